// What the output of a head is multiplied with: sigmoid(s), or s sigmoid(s) for `silu`.
METAL_FUNC float gate_of(float score, bool silu) {
  const float gate = 1.0f / (1.0f + metal::precise::exp(-score));
  // s sigmoid(s) tends to 0, where -inf * 0 would be NaN.
  return silu && gate != 0.0f ? score * gate : gate;
}
