// Cosines and sines of the rotary embedding for L positions of each sequence, and the first positions once more. One
// thread a frequency of a token.
const uint j = thread_position_in_grid.x;
const uint l = thread_position_in_grid.y;
const uint b = thread_position_in_grid.z;
// STARTS is at least the number of sequences.
if (l == 0 && j == 0) starts[b] = positions[b];
if (l == 0 && b == 0 && j >= threads_per_grid.z && j < STARTS) starts[j] = 0;
if (j >= R / 2) return;
const size_t at = (size_t(b) * L + l) * (R / 2) + j;
float c, s;
rope_cos_sin(turns[j], uint(positions[b]) + l, c, s);
cosines[at] = c;
sines[at] = s;
