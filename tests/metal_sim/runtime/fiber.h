// Fibers: one per simulated GPU thread, all on one operating system thread. A fiber runs until it
// gives way at a barrier or a SIMD-group operation, so a kernel needs no lock and every run is
// reproducible. ucontext would do the same with two system calls a switch.
#pragma once

#include <cstdint>

#if !defined(__x86_64__) || !defined(__linux__)
#error "metal_sim runs on x86-64 Linux only"
#endif

// Save the callee-saved registers on the running stack, its pointer in *saved, and resume `target`.
extern "C" void fiber_switch(void** saved, void* target);

asm(R"(
.text
.globl fiber_switch
.type fiber_switch, @function
fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size fiber_switch, .-fiber_switch
)");

// A stack that, when switched to, calls `entry`, which must never return.
inline void* fiber_prepare(char* stack_top, void (*entry)()) {
    auto** pointer = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack_top) & ~uintptr_t(15));
    *--pointer = nullptr;  // return address of `entry`: keeps the alignment that the ABI promises it
    *--pointer = reinterpret_cast<void*>(entry);
    for (int saved_register = 0; saved_register < 6; ++saved_register) {
        *--pointer = nullptr;
    }
    return pointer;
}
