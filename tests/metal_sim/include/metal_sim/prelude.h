// Included before every kernel: Metal's keywords in terms of OpenCL's, then what MLX puts in front of a
// custom kernel, and the function that calls the kernel.
#pragma once

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable

#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private

// Ordinary names in Metal, keywords in OpenCL.
#define kernel metal_sim_kernel
#define local metal_sim_local
#define global metal_sim_global
#define private metal_sim_private
#define generic metal_sim_generic

#include <metal_stdlib>

#include "mlx/backend/metal/kernels/utils.h"

extern "C" const uint* msim_thread_attribute(uint attribute);

namespace metal_sim {

// An argument of the kernel from one word of the launch: a buffer address for pointers and references,
// the number of a thread attribute for values.
template <class T>
struct argument {
    METAL_SIM_UNCHECKED static T from(void* word) {
        const uint* value = msim_thread_attribute(uint(ulong(word)));
        if constexpr (vector_traits<T>::size == 1) {
            return T(value[0]);
        } else {
            return T{value[0], value[1], value[2]};
        }
    }
};
template <class T>
struct argument<T*> {
    METAL_SIM_UNCHECKED static T* from(void* word) { return (T*)ulong(word); }
};
template <class T>
struct argument<T&> {
    METAL_SIM_UNCHECKED static T& from(void* word) { return *(T*)ulong(word); }
};

template <class T, T... I>
struct sequence {};

template <class... A, int... I>
METAL_SIM_UNCHECKED void call(void (*function)(A...), void** words, sequence<int, I...>) {
    function(argument<A>::from(words[I])...);
}
template <class... A>
METAL_SIM_UNCHECKED void call(void (*function)(A...), void** words) {
    call(function, words, __make_integer_seq<sequence, int, sizeof...(A)>{});
}

}  // namespace metal_sim

using namespace metal;
