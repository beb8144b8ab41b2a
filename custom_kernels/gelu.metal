// GELU(z) = z erfc(-z / sqrt 2) / 2, with erfc(a) = t exp(-a^2 + p(t)), t = 1 / (1 + a / 2): a Chebyshev fit whose
// relative error is below 1.2e-7 for all a >= 0 (Press et al., Numerical Recipes, 6.2), so that the negative tail
// keeps its relative accuracy.
METAL_FUNC float gelu(float z) {
  const float a = metal::abs(z) * 0.70710678118654752f;
  const float t = 1.0f / (1.0f + 0.5f * a);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  const float tail = t * metal::precise::exp(p - a * a);
  if (z >= 0.0f) return z * (1.0f - 0.5f * tail);
  // -inf * 0 would be NaN where GELU(-inf) is 0.
  return tail == 0.0f ? 0.0f : 0.5f * z * tail;
}
