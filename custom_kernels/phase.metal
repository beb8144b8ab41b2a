// Cosine and sine of position * turn, where `turn` counts turns per position in 0.64 fixed point: the product
// modulo 2^64 is the exact phase, and its upper half, read as signed, the angle in 2^-32 turns.
METAL_FUNC void rope_cos_sin(uint64_t turn, uint position, thread float& c, thread float& s) {
  const uint phase = uint((turn * uint64_t(position)) >> 32);
  const float angle = float(as_type<int>(phase)) * 1.4629180792671596e-9f;
  c = metal::precise::cos(angle);
  s = metal::precise::sin(angle);
}
