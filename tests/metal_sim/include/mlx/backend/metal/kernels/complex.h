// Stand-in for the header of MLX, whose overloads by address space clang refuses: just what utils.h
// mentions. Our kernels use no complex numbers.
#pragma once

#include <metal_stdlib>

using namespace metal;

template <class T>
struct complex_t {
    T real, imag;
    constexpr complex_t(T r, T i) : real(r), imag(i) {}
};
typedef complex_t<float> complex64_t;
