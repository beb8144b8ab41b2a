// The executor: runs a compiled kernel one threadgroup at a time, each GPU thread a fiber.
//
// The kernel is compiled with clang's kernel-address sanitizer in its outline mode, in which every
// load and store is preceded by a call of __asan_load4_noabort and the like. Those functions are
// defined here. A forbidden access is reported before it happens and the launch is dropped, so a
// wrong kernel cannot harm the process. The __ubsan_handle_* functions at the end serve the
// undefined-behaviour checks in the same way. No sanitizer runtime is linked.
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "fiber.h"
#include "shadow.h"

// ---- Interface to executor.py, which mirrors these structures ------------------------------------
extern "C" {
enum BufferFlags : uint32_t {
    kWritable = 1,      // copied back to `host` after the launch
    kPoisoned = 2,      // an output without initial value: no byte may be read before it is written
    kMayBePartial = 4,  // an output that need not be written in full
};

struct BufferSpec {
    const char* name;
    void* host;
    uint64_t size;
    uint32_t flags;
    uint32_t offset;      // added to a 16-byte aligned address
    const uint8_t* gaps;  // one byte per byte, 1 where a strided input has no element; or null
};

struct ParameterSpec {
    uint32_t is_attribute;
    uint32_t index;  // into the buffers, or the number of the thread attribute
};

struct LaunchSpec {
    void (*entry)(void**);
    const ParameterSpec* parameters;
    const BufferSpec* buffers;
    uint32_t parameter_count, buffer_count;
    uint32_t grid[3], threadgroup[3];
    uint32_t order;      // 0 forward, 1 reverse, 2 shuffle
    uint32_t sum_order;  // 0 butterfly, 1 butterfly reversed, 2 ascending, 3 descending
    uint32_t seed;
    uint32_t misaligned;
    uint32_t same_value_races;
    double timeout_s;
};

struct FindingRecord {
    char kind[24];
    char buffer[64];
    char text[256];
    uint64_t code_offset;  // of the instruction behind the access, in the kernel's library; 0: see line
    uint32_t line;
    int32_t thread;  // -1: no thread was running
    uint32_t lane, simdgroup;
    uint32_t threadgroup[3];
};
}

namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kArenaBytes = size_t(32) << 30;
constexpr size_t kArenaSpacing = size_t(256) << 20;
constexpr size_t kThreadgroupMemoryLimit = 32 << 10;
constexpr size_t kMaximumFindings = 16;
constexpr uint32_t kMemDevice = 1, kMemThreadgroup = 2;  // mem_flags
constexpr uint32_t kSimdBarrier = ~0u;                   // operation number of simdgroup_barrier
const int kTimeoutSignal = SIGRTMIN + 3;                 // SIGALRM may be a test runner's

// ---- State -------------------------------------------------------------------------------------
enum class Space : uint8_t { Device, Threadgroup };
enum class State : uint8_t { Ready, AtSimdOperation, AtBarrier, Done };

struct Region {  // a buffer or a threadgroup variable
    std::string name;
    char* base;
    size_t size;
    Space space;
    bool writable;
    bool starts_initialised;
    uint32_t line = 0;  // where a threadgroup variable is declared
    const uint8_t* gaps = nullptr;
    ShadowArray shadow;  // none for read-only memory

    bool contains(const char* address) const { return address >= base && address < base + size; }
};

// A write that races with another write. Whether both wrote the same value, which GPUs bear, shows
// only after the store: the old bytes are kept until the thread's next report.
struct PendingWrite {
    char* address = nullptr;
    size_t size = 0;
    unsigned char old[64];
    const void* code = nullptr;
    const Region* region = nullptr;
    Stamp other;
};

struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    State state = State::Done;
    uint32_t index = 0;      // in the threadgroup
    uint32_t site = 0;       // line << 10 | column of the call it waits in
    uint32_t operation = 0;  // which SIMD-group operation
    uint32_t flags = 0;      // mem_flags of the barrier
    PendingWrite pending;

    uint32_t lane() const { return index % kSimdWidth; }
    uint32_t simdgroup() const { return index / kSimdWidth; }
};

struct LaneSlot {
    alignas(16) unsigned char bytes[64];
};

// What the lanes of a SIMD-group see of each other. metal_simdgroup declares the same structure.
struct SimdView {
    uint32_t active;      // bit per lane
    uint32_t has_result;  // the first lane to resume stores a reduction for the others
    LaneSlot result;
    LaneSlot lanes[kSimdWidth];
};

struct Simdgroup {
    LaneSlot arriving[kSimdWidth];
    SimdView view;
    uint32_t epoch[2] = {1, 1};  // by Space
};

struct Launch {
    LaunchSpec spec;
    std::vector<void*> arguments;
    std::deque<Region> buffers;    // deques: regions are pointed at
    std::deque<Region> variables;  // threadgroup variables, registered when first declared
    size_t variable_bytes = 0;
    Region* last_buffer = nullptr;
    std::vector<Fiber> fibers;
    std::vector<Simdgroup> simdgroups;
    uint32_t nominal[3], groups[3];  // threads per threadgroup, threadgroups
    uint32_t group[3], size[3];      // of the running threadgroup
    uint32_t thread_count = 0;
    uint32_t group_number = 0;   // counted from 1
    uint32_t epoch[2] = {1, 1};  // by Space
    uint32_t random = 1;
    uintptr_t code_begin = 0, code_end = 0;  // the kernel's library
    std::vector<FindingRecord> findings;
    bool aborted = false;
};

Launch* launch = nullptr;
Fiber* running = nullptr;
void* scheduler_stack_pointer = nullptr;
volatile sig_atomic_t timed_out = 0;
std::vector<char*> stacks;  // kept between launches

char* reserve(size_t bytes) {
    void* memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

// ---- Findings ----------------------------------------------------------------------------------
enum class After { Continue, Abort };

struct Where {
    uint32_t line = 0;
    const void* code = nullptr;  // return address of the callback
    const char* buffer = "";
};

__attribute__((format(printf, 4, 5))) void report(After after, const char* kind, Where where,
                                                  const char* format, ...) {
    Launch& l = *launch;
    const uint64_t offset = where.code ? reinterpret_cast<uintptr_t>(where.code) - l.code_begin : 0;
    const bool known = std::any_of(l.findings.begin(), l.findings.end(), [&](const FindingRecord& f) {
        return !strcmp(f.kind, kind) && f.code_offset == offset && f.line == where.line;
    });
    if (!known && l.findings.size() < kMaximumFindings) {
        FindingRecord record{};
        snprintf(record.kind, sizeof record.kind, "%s", kind);
        snprintf(record.buffer, sizeof record.buffer, "%s", where.buffer);
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(record.text, sizeof record.text, format, arguments);
        va_end(arguments);
        record.code_offset = offset;
        record.line = where.line;
        record.thread = running ? int32_t(running->index) : -1;
        record.lane = running ? running->lane() : 0;
        record.simdgroup = running ? running->simdgroup() : 0;
        std::copy(l.group, l.group + 3, record.threadgroup);
        l.findings.push_back(record);
    }
    if (after == After::Abort) {
        l.aborted = true;
        if (running) {
            running->state = State::Done;
            void* abandoned;
            fiber_switch(&abandoned, scheduler_stack_pointer);
        }
    }
}

const char* missing_barrier(Space space) {
    return space == Space::Threadgroup ? "no barrier with mem_threadgroup between them"
                                       : "no barrier with mem_device between them";
}

// ---- Memory accesses ---------------------------------------------------------------------------
struct Access {
    char* address;
    size_t size;
    bool write;
    bool atomic;
    const void* code;

    const char* verb() const { return write ? "write" : "read"; }
};

void settle_pending_write(Fiber& fiber) {
    PendingWrite& pending = fiber.pending;
    if (!pending.address) return;
    if (memcmp(pending.address, pending.old, pending.size) != 0) {
        report(After::Continue, "race", {0, pending.code, pending.region->name.c_str()},
               "write of '%s' at byte %td races with the write of another value by thread %u of threadgroup "
               "%u (%s)",
               pending.region->name.c_str(), pending.address - pending.region->base, pending.other.thread,
               pending.other.threadgroup - 1, missing_barrier(pending.region->space));
    }
    pending.address = nullptr;
}

void check_shadow(Region& region, const Access& access) {
    Launch& l = *launch;
    const size_t begin = access.address - region.base, end = begin + access.size;
    const Where where{0, access.code, region.name.c_str()};
    const int space = int(region.space);
    const Stamp now{l.group_number, l.epoch[space], l.simdgroups[running->simdgroup()].epoch[space],
                    uint16_t(running->index), access.atomic};
    bool race_reported = false;
    for (size_t i = begin; i < end; ++i) {
        ByteShadow& byte = region.shadow[i];
        if (region.space == Space::Threadgroup) forget_other_threadgroups(byte, l.group_number);
        if (!access.write && !byte.initialised && !region.starts_initialised) {
            report(After::Continue, "uninitialised", where, "read of '%s' at byte %zu before any write",
                   region.name.c_str(), i);
            byte.initialised = true;  // once is enough
        }
        if (!race_reported && races_with_write(byte, now)) {
            race_reported = true;
            if (access.write && !l.spec.same_value_races && access.size <= sizeof(PendingWrite::old)) {
                running->pending = {access.address, access.size, {}, access.code, &region, byte.write};
                memcpy(running->pending.old, access.address, access.size);
            } else {
                report(After::Continue, "race", where,
                       "%s of '%s' at byte %zu races with the write by thread %u of threadgroup %u (%s)",
                       access.verb(), region.name.c_str(), i, byte.write.thread, byte.write.threadgroup - 1,
                       missing_barrier(region.space));
            }
        }
        if (!race_reported && access.write && races_with_reads(byte, now)) {
            race_reported = true;
            report(After::Continue, "race", where,
                   "write of '%s' at byte %zu races with the read by thread %u of threadgroup %u (%s)",
                   region.name.c_str(), i, byte.read.thread, byte.read.threadgroup - 1,
                   missing_barrier(region.space));
        }
        if (access.write) {
            record_write(byte, now);
        } else {
            record_read(byte, now);
        }
    }
}

void check_region(Region& region, const Access& access) {
    const size_t begin = access.address - region.base;
    const char* name = region.name.c_str();
    const Where where{0, access.code, name};
    if (begin + access.size > region.size) {
        report(After::Abort, "out-of-bounds", where,
               "%s of %zu bytes at byte %zu of '%s', which has %zu bytes", access.verb(), access.size, begin,
               name, region.size);
    }
    if (access.write && !region.writable) {
        report(After::Abort, "read-only", where, "write of %zu bytes at byte %zu of the read-only input '%s'",
               access.size, begin, name);
    }
    if (region.gaps && memchr(region.gaps + begin, 1, access.size)) {
        report(After::Abort, "stride-gap", where,
               "%s at byte %zu of the strided input '%s', where it has no element", access.verb(), begin,
               name);
    }
    if (region.writable) check_shadow(region, access);
}

[[gnu::cold]] void report_wild_access(const Access& access) {
    // Name the buffer that was most likely meant: the nearest, also when a 32-bit index that wrapped
    // below zero has carried the address 2^32 elements too far.
    const Region* meant = nullptr;
    ptrdiff_t offset = 0;
    size_t distance = SIZE_MAX;
    bool wrapped = false;
    for (const auto* regions : {&launch->buffers, &launch->variables}) {
        for (const Region& region : *regions) {
            for (size_t element = 0; element <= 16; element = element ? 2 * element : 1) {
                const ptrdiff_t at = access.address - region.base - ptrdiff_t(element << 32);
                const size_t away = at < 0 ? size_t(-at) : size_t(at) - std::min(size_t(at), region.size);
                if (away < distance) meant = &region, offset = at, distance = away, wrapped = element != 0;
            }
        }
    }
    if (meant) {
        report(After::Abort, "out-of-bounds", {0, access.code, meant->name.c_str()},
               "%s of %zu bytes at byte %td of '%s', which has %zu bytes%s", access.verb(), access.size,
               offset, meant->name.c_str(), meant->size, wrapped ? " (a 32-bit index has wrapped)" : "");
    }
    report(After::Abort, "out-of-bounds", {0, access.code}, "%s of %zu bytes at a wild address",
           access.verb(), access.size);
}

void report_timeout(const void* code, uint32_t line) {
    report(After::Abort, "timeout", {line, code}, "the launch has not ended after %g seconds",
           launch->spec.timeout_s);
}

void check_access(const Access& access) {
    if (!running) return;
    if (running->pending.address) settle_pending_write(*running);
    if (timed_out) report_timeout(access.code, 0);
    // Private memory: clang's own bounds check guards arrays of known size.
    if (access.address >= running->stack && access.address < running->stack + kStackBytes) return;
    for (Region& variable : launch->variables) {
        if (variable.contains(access.address)) return check_region(variable, access);
    }
    if (launch->last_buffer && launch->last_buffer->contains(access.address)) {
        return check_region(*launch->last_buffer, access);
    }
    for (Region& buffer : launch->buffers) {
        if (buffer.contains(access.address)) {
            launch->last_buffer = &buffer;
            return check_region(buffer, access);
        }
    }
    const auto address = reinterpret_cast<uintptr_t>(access.address);
    const bool is_table =
        address >= launch->code_begin && address < launch->code_end;  // constants of the kernel
    if (!is_table || access.write) report_wild_access(access);
}

// ---- Scheduling --------------------------------------------------------------------------------
void fiber_main() {
    launch->spec.entry(launch->arguments.data());
    settle_pending_write(*running);
    running->state = State::Done;
    void* finished;
    fiber_switch(&finished, scheduler_stack_pointer);
    __builtin_trap();
}

void give_way(State state, uint32_t site, uint32_t operation, uint32_t flags) {
    Fiber& fiber = *running;
    settle_pending_write(fiber);
    if (timed_out) report_timeout(nullptr, site >> 10);
    fiber.state = state;
    fiber.site = site;
    fiber.operation = operation;
    fiber.flags = flags;
    fiber_switch(&fiber.stack_pointer, scheduler_stack_pointer);
}

void advance_epochs(uint32_t (&epoch)[2], uint32_t flags) {
    if (flags & kMemDevice) epoch[int(Space::Device)]++;
    if (flags & kMemThreadgroup) epoch[int(Space::Threadgroup)]++;
}

// Let the lanes of one SIMD-group exchange values once all have arrived. With `force` the first
// operation that any lane waits in goes ahead with the lanes at hand; that is divergence.
bool complete_simd_operation(uint32_t simdgroup, bool force) {
    Launch& l = *launch;
    Fiber* const begin = &l.fibers[simdgroup * kSimdWidth];
    Fiber* const end = &l.fibers[0] + std::min((simdgroup + 1) * kSimdWidth, l.thread_count);
    const Fiber* first = nullptr;
    bool diverged = false;
    for (Fiber* f = begin; f != end; ++f) {
        if (f->state == State::Ready) return false;
        if (f->state == State::AtBarrier) diverged = true;
        if (f->state != State::AtSimdOperation) continue;
        if (!first) first = f;
        diverged |= f->site != first->site || f->operation != first->operation;
    }
    if (!first || (diverged && !force)) return false;

    Simdgroup& group = l.simdgroups[simdgroup];
    const uint32_t site = first->site, operation = first->operation, flags = first->flags;
    group.view.active = 0;
    group.view.has_result = 0;
    for (Fiber* f = begin; f != end; ++f) {
        if (f->state != State::AtSimdOperation || f->site != site || f->operation != operation) continue;
        group.view.active |= 1u << f->lane();
        group.view.lanes[f->lane()] = group.arriving[f->lane()];
        f->state = State::Ready;
    }
    if (diverged) {
        report(After::Continue, "divergence", {site >> 10},
               "SIMD-group operation reached by only some lanes of simdgroup %u (active mask %08x)",
               simdgroup, group.view.active);
    }
    if (operation == kSimdBarrier) advance_epochs(group.epoch, flags);
    return true;
}

bool complete_simd_operations(bool force) {
    bool progress = false;
    for (uint32_t s = 0; s < launch->simdgroups.size(); ++s) progress |= complete_simd_operation(s, force);
    return progress;
}

// Every thread waits or has ended and no SIMD-group can go on: open the barrier if all stand at it.
// False at the end of the threadgroup.
bool complete_barrier() {
    Launch& l = *launch;
    uint32_t alive = 0, waiting = 0, flags = ~0u;
    const Fiber* first = nullptr;
    const Fiber* elsewhere = nullptr;
    for (uint32_t t = 0; t < l.thread_count; ++t) {
        const Fiber& fiber = l.fibers[t];
        if (fiber.state == State::Done) continue;
        alive++;
        if (fiber.state != State::AtBarrier) continue;
        waiting++;
        flags &= fiber.flags;
        if (!first) first = &fiber;
        if (fiber.site != first->site) elsewhere = &fiber;
    }
    if (alive == 0) return false;
    if (waiting < alive)
        return complete_simd_operations(true);  // the rest stands in diverged SIMD operations
    if (elsewhere) {
        report(After::Abort, "barrier", {first->site >> 10},
               "threads of one threadgroup wait at different barriers (thread %u at line %u)",
               elsewhere->index, elsewhere->site >> 10);
    } else if (alive < l.thread_count) {
        report(After::Abort, "barrier", {first->site >> 10},
               "threadgroup barrier reached by %u of %u threads; the others have returned", waiting,
               l.thread_count);
    } else {
        advance_epochs(l.epoch, flags);
        for (uint32_t t = 0; t < l.thread_count; ++t) l.fibers[t].state = State::Ready;
    }
    return !l.aborted;
}

void shuffle(std::vector<uint32_t>& order) {
    for (uint32_t i = uint32_t(order.size()) - 1; i > 0; --i) {
        launch->random = launch->random * 1664525u + 1013904223u;  // the LCG of Numerical Recipes
        std::swap(order[i], order[(launch->random >> 8) % (i + 1)]);
    }
}

void run_threadgroup() {
    Launch& l = *launch;
    std::vector<uint32_t> order(l.thread_count);
    for (uint32_t t = 0; t < l.thread_count; ++t) order[t] = l.spec.order == 1 ? l.thread_count - 1 - t : t;
    do {
        if (l.spec.order == 2) shuffle(order);
        for (uint32_t t : order) {
            if (l.fibers[t].state != State::Ready) continue;
            running = &l.fibers[t];
            fiber_switch(&scheduler_stack_pointer, running->stack_pointer);
            running = nullptr;
            if (l.aborted) return;
        }
    } while (complete_simd_operations(false) || complete_barrier());
}

void start_threadgroup(uint32_t number) {
    Launch& l = *launch;
    l.group_number = number + 1;
    l.group[0] = number % l.groups[0];
    l.group[1] = number / l.groups[0] % l.groups[1];
    l.group[2] = number / l.groups[0] / l.groups[1];
    for (int axis = 0; axis < 3; ++axis) {
        l.size[axis] = std::min(l.nominal[axis], l.spec.grid[axis] - l.group[axis] * l.nominal[axis]);
    }
    l.thread_count = l.size[0] * l.size[1] * l.size[2];
    l.simdgroups.resize((l.thread_count + kSimdWidth - 1) / kSimdWidth);
    l.fibers.resize(std::max<size_t>(l.fibers.size(), l.thread_count));
    while (stacks.size() < l.thread_count) stacks.push_back(reserve(kStackBytes));
    for (uint32_t t = 0; t < l.thread_count; ++t) {
        Fiber& fiber = l.fibers[t];
        fiber.index = t;
        fiber.stack = stacks[t];
        fiber.state = State::Ready;
        fiber.stack_pointer = fiber_prepare(fiber.stack + kStackBytes, fiber_main);
    }
}

// ---- Setting up a launch -------------------------------------------------------------------------
// All buffers lie in one reserved range, far apart: a stray index meets no other buffer.
bool place_buffers() {
    static char* const arena = reserve(kArenaBytes);
    if (!arena) return false;
    char* next = arena + kArenaSpacing;
    for (uint32_t i = 0; i < launch->spec.buffer_count; ++i) {
        const BufferSpec& spec = launch->spec.buffers[i];
        if (next + spec.size + kArenaSpacing > arena + kArenaBytes) return false;
        Region region;
        region.name = spec.name;
        region.base = next + spec.offset;
        region.size = spec.size;
        region.space = Space::Device;
        region.writable = spec.flags & kWritable;
        region.starts_initialised = !(spec.flags & kPoisoned);
        region.gaps = spec.gaps;
        if (region.writable) region.shadow = make_shadow(spec.size);
        if (spec.flags & kPoisoned) {
            memset(region.base, 0xff, spec.size);  // a NaN in every float type
        } else {
            memcpy(region.base, spec.host, spec.size);
        }
        launch->buffers.push_back(std::move(region));
        next += (spec.size / kArenaSpacing + 2) * kArenaSpacing;
    }
    return true;
}

void check_outputs_written() {
    for (uint32_t i = 0; i < launch->spec.buffer_count; ++i) {
        const BufferSpec& spec = launch->spec.buffers[i];
        if (!(spec.flags & kPoisoned) || (spec.flags & kMayBePartial)) continue;
        const ByteShadow* shadow = launch->buffers[i].shadow.get();
        const auto unwritten = [](const ByteShadow& byte) { return byte.write.threadgroup == 0; };
        const size_t first = std::find_if(shadow, shadow + spec.size, unwritten) - shadow;
        if (first == spec.size) continue;
        const auto count = std::count_if(shadow, shadow + spec.size, unwritten);
        report(After::Continue, "unwritten", {0, nullptr, spec.name},
               "%td of %zu bytes of output '%s' were never written, the first at byte %zu", ptrdiff_t(count),
               size_t(spec.size), spec.name, first);
    }
}

// Where the kernel's library lies: its addresses become file offsets, its constants are readable.
int find_library(dl_phdr_info* library, size_t, void* data) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    uintptr_t end = 0;
    bool found = false;
    for (int i = 0; i < library->dlpi_phnum; ++i) {
        const auto& segment = library->dlpi_phdr[i];
        if (segment.p_type != PT_LOAD) continue;
        const uintptr_t from = library->dlpi_addr + segment.p_vaddr, to = from + segment.p_memsz;
        found |= address >= from && address < to;
        end = std::max(end, to);
    }
    if (!found) return 0;
    launch->code_begin = library->dlpi_addr;
    launch->code_end = end;
    return 1;
}

// ---- Time limit ----------------------------------------------------------------------------------
void on_timeout(int, siginfo_t*, void* context) {
    timed_out = 1;
    // Only the kernel's own code may be left from here: the runtime might be within malloc. It asks
    // for `timed_out` itself.
    const auto* state = static_cast<const ucontext_t*>(context);
    const auto code = static_cast<uintptr_t>(state->uc_mcontext.gregs[REG_RIP]);
    if (running && code >= launch->code_begin && code < launch->code_end) {
        report_timeout(reinterpret_cast<void*>(code + 1), 0);
    }
}

class Watchdog {
 public:
    explicit Watchdog(double seconds) {
        timed_out = 0;
        struct sigaction action{};
        action.sa_sigaction = on_timeout;
        action.sa_flags = SA_SIGINFO | SA_NODEFER;  // the handler may leave by switching fibers
        sigaction(kTimeoutSignal, &action, &previous_);
        sigevent event{};
        event.sigev_notify = SIGEV_THREAD_ID;  // this thread, not one of MLX's
        event.sigev_signo = kTimeoutSignal;
        event._sigev_un._tid = pid_t(syscall(SYS_gettid));
        timer_create(CLOCK_MONOTONIC, &event, &timer_);
        itimerspec limit{};
        limit.it_value.tv_sec = time_t(seconds);
        limit.it_value.tv_nsec = long((seconds - double(time_t(seconds))) * 1e9);
        timer_settime(timer_, 0, &limit, nullptr);
    }
    ~Watchdog() {
        timer_delete(timer_);
        sigaction(kTimeoutSignal, &previous_, nullptr);
    }
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

 private:
    timer_t timer_;
    struct sigaction previous_;
};

}  // namespace

// ---- Called by executor.py -----------------------------------------------------------------------
// Run one launch. Returns the number of findings written to `findings`, or -1 if the buffers do not
// fit into the reserved address range.
extern "C" int msim_launch(const LaunchSpec* spec, FindingRecord* findings, uint32_t maximum) {
    Launch state;
    launch = &state;
    state.spec = *spec;
    state.random = spec->seed;
    dl_iterate_phdr(find_library, reinterpret_cast<void*>(spec->entry));
    if (!place_buffers()) {
        launch = nullptr;
        return -1;
    }
    for (uint32_t i = 0; i < spec->parameter_count; ++i) {
        const ParameterSpec& parameter = spec->parameters[i];
        state.arguments.push_back(parameter.is_attribute ? reinterpret_cast<void*>(uintptr_t(parameter.index))
                                                         : state.buffers[parameter.index].base);
    }
    uint32_t total = 1;
    for (int axis = 0; axis < 3; ++axis) {
        state.nominal[axis] = std::min(spec->threadgroup[axis], spec->grid[axis]);
        state.groups[axis] = (spec->grid[axis] + state.nominal[axis] - 1) / state.nominal[axis];
        total *= state.groups[axis];
    }
    {
        Watchdog watchdog(spec->timeout_s);
        for (uint32_t i = 0; i < total && !state.aborted; ++i) {
            start_threadgroup(spec->order == 1 ? total - 1 - i : i);
            run_threadgroup();
        }
    }
    if (!state.aborted) check_outputs_written();
    for (uint32_t i = 0; i < spec->buffer_count; ++i) {
        const BufferSpec& buffer = spec->buffers[i];
        if (buffer.flags & kWritable) memcpy(buffer.host, state.buffers[i].base, buffer.size);
    }
    const size_t count = std::min<size_t>(state.findings.size(), maximum);
    std::copy_n(state.findings.begin(), count, findings);
    launch = nullptr;
    return int(count);
}

// ---- Called by kernels, through the headers in include/ -------------------------------------------
extern "C" {

uint32_t msim_lane() { return running->lane(); }

uint32_t msim_sum_order() { return launch->spec.sum_order; }

enum class Attribute : uint32_t {  // numbered as in source.THREAD_ATTRIBUTES
    dispatch_quadgroups_per_threadgroup,
    dispatch_simdgroups_per_threadgroup,
    dispatch_threads_per_threadgroup,
    grid_origin,
    grid_size,
    quadgroup_index_in_threadgroup,
    quadgroups_per_threadgroup,
    simdgroup_index_in_threadgroup,
    simdgroups_per_threadgroup,
    thread_execution_width,
    thread_index_in_quadgroup,
    thread_index_in_simdgroup,
    thread_index_in_threadgroup,
    thread_position_in_grid,
    thread_position_in_threadgroup,
    threadgroup_position_in_grid,
    threadgroups_per_grid,
    threads_per_grid,
    threads_per_simdgroup,
    threads_per_threadgroup,
};

// The value of a thread attribute; one word for scalars, three for vectors.
const uint32_t* msim_thread_attribute(Attribute attribute) {
    constexpr uint32_t kQuadWidth = 4;
    static uint32_t value[3];
    const Launch& l = *launch;
    const uint32_t t = running->index;
    const uint32_t in_group[3] = {t % l.size[0], t / l.size[0] % l.size[1], t / l.size[0] / l.size[1]};
    const uint32_t nominal_threads = l.nominal[0] * l.nominal[1] * l.nominal[2];
    const auto scalar = [](uint32_t v) {
        value[0] = v;
        return value;
    };
    const auto count = [&](uint32_t threads, uint32_t width) {
        return scalar((threads + width - 1) / width);
    };
    switch (attribute) {
        case Attribute::dispatch_quadgroups_per_threadgroup: return count(nominal_threads, kQuadWidth);
        case Attribute::dispatch_simdgroups_per_threadgroup: return count(nominal_threads, kSimdWidth);
        case Attribute::dispatch_threads_per_threadgroup: return l.nominal;
        case Attribute::grid_origin: return std::fill_n(value, 3, 0) - 3;
        case Attribute::grid_size: return l.spec.grid;
        case Attribute::quadgroup_index_in_threadgroup: return scalar(t / kQuadWidth);
        case Attribute::quadgroups_per_threadgroup: return count(l.thread_count, kQuadWidth);
        case Attribute::simdgroup_index_in_threadgroup: return scalar(running->simdgroup());
        case Attribute::simdgroups_per_threadgroup: return count(l.thread_count, kSimdWidth);
        case Attribute::thread_execution_width: return scalar(kSimdWidth);
        case Attribute::thread_index_in_quadgroup: return scalar(t % kQuadWidth);
        case Attribute::thread_index_in_simdgroup: return scalar(running->lane());
        case Attribute::thread_index_in_threadgroup: return scalar(t);
        case Attribute::thread_position_in_grid:
            for (int axis = 0; axis < 3; ++axis) {
                value[axis] = l.group[axis] * l.nominal[axis] + in_group[axis];
            }
            return value;
        case Attribute::thread_position_in_threadgroup: return std::copy_n(in_group, 3, value) - 3;
        case Attribute::threadgroup_position_in_grid: return l.group;
        case Attribute::threadgroups_per_grid: return l.groups;
        case Attribute::threads_per_grid: return l.spec.grid;
        case Attribute::threads_per_simdgroup: return scalar(kSimdWidth);
        case Attribute::threads_per_threadgroup: return l.size;
    }
    __builtin_unreachable();
}

SimdView* msim_simd_exchange(const void* lane_value, uint32_t size, uint32_t site, uint32_t operation) {
    Simdgroup& group = launch->simdgroups[running->simdgroup()];
    memcpy(group.arriving[running->lane()].bytes, lane_value, size);
    give_way(State::AtSimdOperation, site, operation, 0);
    return &group.view;
}

void msim_simdgroup_barrier(uint32_t flags, uint32_t site) {
    give_way(State::AtSimdOperation, site, kSimdBarrier, flags);
}

void msim_threadgroup_barrier(uint32_t flags, uint32_t site) { give_way(State::AtBarrier, site, 0, flags); }

void msim_bad_lane(uint32_t lane, uint32_t site, const char* function) {
    report(After::Continue, "simd-lane", {site >> 10}, "%s reads lane %u, which is %s", function, lane,
           lane < kSimdWidth ? "inactive" : "outside the simdgroup");
}

void* msim_threadgroup_variable(size_t size, size_t alignment, const char* name, uint32_t line) {
    Launch& l = *launch;
    for (const Region& variable : l.variables) {
        if (variable.line == line && variable.name == name) return variable.base;
    }
    constexpr size_t kSpacing = 1 << 20;
    static char* const arena = reserve(256 * kSpacing);
    l.variable_bytes += (size + 15) & ~size_t(15);
    if (l.variable_bytes > kThreadgroupMemoryLimit) {
        report(After::Abort, "threadgroup-memory", {line, nullptr, name},
               "%zu bytes of threadgroup variables; the limit is %zu", l.variable_bytes,
               kThreadgroupMemoryLimit);
    }
    Region region;
    region.name = name;
    region.base = arena + (l.variables.size() * 2 + 1) * kSpacing + (l.spec.misaligned ? alignment : 0);
    region.size = size;
    region.space = Space::Threadgroup;
    region.writable = true;
    region.starts_initialised = false;
    region.line = line;
    region.shadow = make_shadow(size);
    memset(region.base, 0xff, size);
    l.variables.push_back(std::move(region));
    return l.variables.back().base;
}

#define CALLER __builtin_return_address(0)

void msim_atomic_access(void* address, size_t size, uint32_t reads, uint32_t writes) {
    if (reads) check_access({static_cast<char*>(address), size, false, true, CALLER});
    if (writes) check_access({static_cast<char*>(address), size, true, true, CALLER});
}

// Compiler support that libgcc lacks before version 13: round to nearest, ties to even.
__bf16 __truncsfbf2(float value) {
    uint32_t bits = __builtin_bit_cast(uint32_t, value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    bits = is_nan ? bits | 0x00400000u : bits + 0x7fffu + (bits >> 16 & 1u);
    return __builtin_bit_cast(__bf16, uint16_t(bits >> 16));
}

// ---- Called by instrumented code -------------------------------------------------------------------
#define ACCESS_CALLBACKS(BYTES)                                                                    \
    void __asan_load##BYTES##_noabort(char* p) { check_access({p, BYTES, false, false, CALLER}); } \
    void __asan_store##BYTES##_noabort(char* p) { check_access({p, BYTES, true, false, CALLER}); }
ACCESS_CALLBACKS(1)
ACCESS_CALLBACKS(2)
ACCESS_CALLBACKS(4)
ACCESS_CALLBACKS(8)
ACCESS_CALLBACKS(16)

void __asan_loadN_noabort(char* p, size_t size) { check_access({p, size, false, false, CALLER}); }
void __asan_storeN_noabort(char* p, size_t size) { check_access({p, size, true, false, CALLER}); }

void* __asan_memcpy(char* to, char* from, size_t size) {
    check_access({from, size, false, false, CALLER});
    check_access({to, size, true, false, CALLER});
    return memcpy(to, from, size);
}
void* __asan_memmove(char* to, char* from, size_t size) {
    check_access({from, size, false, false, CALLER});
    check_access({to, size, true, false, CALLER});
    return memmove(to, from, size);
}
void* __asan_memset(char* to, int value, size_t size) {
    check_access({to, size, true, false, CALLER});
    return memset(to, value, size);
}
void __asan_handle_no_return() {}

struct SourceLocation {
    const char* file;
    uint32_t line, column;
};

void __ubsan_handle_out_of_bounds(const SourceLocation* location, uintptr_t index) {
    report(After::Abort, "out-of-bounds", {location->line}, "index %td is outside an array of fixed size",
           ptrdiff_t(index));
}
void __ubsan_handle_type_mismatch_v1(const SourceLocation* location, uintptr_t address) {
    report(After::Abort, "misaligned", {location->line},
           "access at an address that is a multiple of %u bytes only",
           1u << (address ? __builtin_ctzl(address) : 0));
}
#define UNDEFINED_BEHAVIOUR(NAME, AFTER, TEXT)                   \
    void __ubsan_handle_##NAME(const SourceLocation* location) { \
        report(AFTER, "undefined", {location->line}, TEXT);      \
    }
UNDEFINED_BEHAVIOUR(divrem_overflow, After::Abort, "integer division by zero, or overflow in a division")
UNDEFINED_BEHAVIOUR(add_overflow, After::Abort, "signed integer overflow in +")
UNDEFINED_BEHAVIOUR(sub_overflow, After::Abort, "signed integer overflow in -")
UNDEFINED_BEHAVIOUR(mul_overflow, After::Abort, "signed integer overflow in *")
UNDEFINED_BEHAVIOUR(negate_overflow, After::Abort, "signed integer overflow in negation")
UNDEFINED_BEHAVIOUR(missing_return, After::Abort, "a function ended without returning its value")
UNDEFINED_BEHAVIOUR(float_cast_overflow, After::Continue,
                    "floating-point value outside the range of the integer type")

}  // extern "C"
