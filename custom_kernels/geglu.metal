// out = GELU(gate) * up. One thread an element of a row of I.
const uint i = thread_position_in_grid.x;
const size_t row = thread_position_in_grid.y;
if (i >= I) return;
const size_t from = CONCATENATED ? row * (2 * I) + i : row * I + i;
const float u = CONCATENATED ? float(gate[from + I]) : float(up[from]);
out[row * I + i] = T(gelu(float(gate[from])) * u);
