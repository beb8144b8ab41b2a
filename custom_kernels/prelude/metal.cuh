// Gives a CUDA compiler the subset of the Metal Shading Language that the kernels are written in.
// MLX includes its own CUDA headers before this text, so the macros below meet the kernels alone.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int uint;
typedef unsigned short ushort;
typedef __half half;
typedef __half2 half2;
typedef __half float16_t;
typedef __nv_bfloat16 bfloat16_t;

// Address spaces: only `threadgroup` declarations need one on CUDA, and the kernels take no pointers to them.
#define device
#define constant
#define thread
#define threadgroup __shared__
#define METAL_FUNC __device__ __forceinline__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

template <class To, class From>
METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

METAL_FUNC mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

// __syncthreads orders device and shared memory alike.
METAL_FUNC void threadgroup_barrier(mem_flags) { __syncthreads(); }

METAL_FUNC void simdgroup_barrier(mem_flags) { __syncwarp(); }

// Every simd operation of the kernels is reached by whole simdgroups.
template <class T>
METAL_FUNC T simd_shuffle_xor(T x, ushort mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

template <class T>
METAL_FUNC T simd_shuffle(T x, ushort lane) { return __shfl_sync(0xffffffffu, x, lane); }

METAL_FUNC bool simd_any(bool x) { return __any_sync(0xffffffffu, x); }

template <class T>
METAL_FUNC T simd_sum(T x) {
  for (int step = 16; step; step >>= 1) x = x + simd_shuffle_xor(x, step);
  return x;
}

template <class T>
METAL_FUNC T simd_max(T x) {
  for (int step = 16; step; step >>= 1) {
    T y = simd_shuffle_xor(x, step);
    x = y > x ? y : x;
  }
  return x;
}

namespace metal { namespace precise {
METAL_FUNC float exp(float x) { return expf(x); }
METAL_FUNC float rsqrt(float x) { return 1.0f / sqrtf(x); }
METAL_FUNC float sqrt(float x) { return sqrtf(x); }
} }

namespace metal { namespace precise {
METAL_FUNC float sin(float x) { return sinf(x); }
METAL_FUNC float cos(float x) { return cosf(x); }
} }

namespace metal { namespace fast {
METAL_FUNC float exp2(float x) { return exp2f(x); }
} }

namespace metal {
// One instruction where a byte goes to another byte's place.
METAL_FUNC uint insert_bits(uint base, uint insert, uint offset, uint bits) {
  if (bits == 8 && offset == 8) return __byte_perm(insert, base, 0x7604);
  const uint mask = ((1u << bits) - 1u) << offset;
  return (base & ~mask) | ((insert << offset) & mask);
}
}

namespace metal {
template <class T>
METAL_FUNC T max(T a, T b) { return b > a ? b : a; }
template <class T>
METAL_FUNC T min(T a, T b) { return b < a ? b : a; }
METAL_FUNC float abs(float x) { return fabsf(x); }
METAL_FUNC float rint(float x) { return rintf(x); }
}

// Of turbo.metal: a permutation of bytes takes indices of 3 bits, or fills a byte with the top bit of one.
METAL_FUNC uint look_up(uint codes, uint low, uint high) {
  uint signs;
  asm("prmt.b32 %0, %1, %2, 0xd9c8;" : "=r"(signs) : "r"(codes << 4), "r"(codes));
  return __byte_perm(low, high, codes & 0x7777u) ^ signs;
}

// matrix.metal for tensor cores, which take a right operand by columns.
METAL_FUNC uint matrix_row(uint lane) { return lane / 4; }

METAL_FUNC uint matrix_column(uint lane) { return lane % 4 * 2; }

METAL_FUNC float column_max(float x) {
  for (uint mask = 4; mask <= 16; mask *= 2) x = metal::max(x, simd_shuffle_xor(x, mask));
  return x;
}

METAL_FUNC float column_sum(float x) {
  for (uint mask = 4; mask <= 16; mask *= 2) x += simd_shuffle_xor(x, mask);
  return x;
}

METAL_FUNC float other_columns(float x) { return simd_shuffle_xor(x, 2); }

METAL_FUNC uint pack_halves(float low, float high) { return as_type<uint>(__floats2half2_rn(low, high)); }

METAL_FUNC uint right_operand(uint halves) {
  uint transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(halves));
  return transposed;
}

METAL_FUNC void multiply_add(float* c, const uint* a, const uint* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
