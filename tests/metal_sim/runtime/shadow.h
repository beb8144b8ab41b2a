// Shadow memory: for every byte of a writable buffer, who touched it last and under which barriers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

constexpr uint32_t kSimdWidth = 32;

// When and by whom. An epoch counts the barriers that have ordered the memory in question: `epoch`
// those of the threadgroup, `simd_epoch` those of the thread's SIMD-group.
struct Stamp {
    uint32_t threadgroup;  // counted from 1; 0: never
    uint32_t epoch;
    uint32_t simd_epoch;
    uint16_t thread;  // index in the threadgroup
    bool atomic;

    uint32_t simdgroup() const { return thread / kSimdWidth; }
};

// How widely a byte has been read since it was last ordered. One stamp cannot name all readers, but
// a later write only needs to know which barrier would order it behind them all.
enum class Readers : uint8_t { OneThread, OneSimdgroup, OneThreadgroup, ManyThreadgroups };

struct ByteShadow {
    Stamp write;
    Stamp read;
    Readers readers;
    bool initialised;
};

// Does some barrier order the earlier access `past` before the access `now`?
inline bool ordered(const Stamp& past, const Stamp& now) {
    if (past.threadgroup != now.threadgroup) return false;  // nothing orders threadgroups of one launch
    if (past.thread == now.thread || past.epoch < now.epoch) return true;
    return past.simdgroup() == now.simdgroup() && past.simd_epoch < now.simd_epoch;
}

inline bool races_with_write(const ByteShadow& byte, const Stamp& now) {
    if (byte.write.threadgroup == 0 || (byte.write.atomic && now.atomic)) return false;
    return !ordered(byte.write, now);
}

// Does the write `now` race with earlier reads?
inline bool races_with_reads(const ByteShadow& byte, const Stamp& now) {
    if (byte.read.threadgroup == 0 || (byte.read.atomic && now.atomic)) return false;
    if (byte.readers == Readers::ManyThreadgroups || byte.read.threadgroup != now.threadgroup) return true;
    if (byte.read.epoch < now.epoch) return false;
    switch (byte.readers) {
        case Readers::OneThread: return !ordered(byte.read, now);
        case Readers::OneSimdgroup:
            return byte.read.simdgroup() != now.simdgroup() || byte.read.simd_epoch >= now.simd_epoch;
        default: return true;
    }
}

inline void record_read(ByteShadow& byte, const Stamp& now) {
    const Stamp& past = byte.read;
    if (past.threadgroup == 0) {
        byte.readers = Readers::OneThread;
    } else if (past.threadgroup != now.threadgroup) {
        byte.readers = Readers::ManyThreadgroups;
    } else if (byte.readers == Readers::ManyThreadgroups) {
        // stays: no barrier takes it back
    } else if (past.epoch != now.epoch) {
        byte.readers = Readers::OneThread;
    } else if (past.thread != now.thread) {
        const bool within = past.simdgroup() == now.simdgroup() && byte.readers != Readers::OneThreadgroup;
        byte.readers = within ? Readers::OneSimdgroup : Readers::OneThreadgroup;
    }
    byte.read = now;
}

inline void record_write(ByteShadow& byte, const Stamp& now) {
    byte.write = now;
    byte.initialised = true;
}

// Threadgroup memory does not outlive its threadgroup: what an earlier one left is as good as unwritten.
inline void forget_other_threadgroups(ByteShadow& byte, uint32_t threadgroup) {
    if (byte.write.threadgroup != threadgroup) {
        byte.write = Stamp{};
        byte.initialised = false;
    }
    if (byte.read.threadgroup != threadgroup) byte.read = Stamp{};
}

struct FreeDeleter {
    void operator()(void* pointer) const { std::free(pointer); }
};
using ShadowArray = std::unique_ptr<ByteShadow[], FreeDeleter>;

// calloc: a page of shadow costs nothing until a kernel touches its bytes.
inline ShadowArray make_shadow(size_t bytes) {
    return ShadowArray(static_cast<ByteShadow*>(std::calloc(bytes ? bytes : 1, sizeof(ByteShadow))));
}
