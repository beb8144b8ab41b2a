// Cosines and sines of the rotary embedding for L positions of each sequence. One thread a frequency of a token.
const uint j = thread_position_in_grid.x;
const uint l = thread_position_in_grid.y;
const uint b = thread_position_in_grid.z;
if (j >= R / 2) return;
const size_t at = (size_t(b) * L + l) * (R / 2) + j;
float c, s;
rope_cos_sin(turns[j], uint(positions[b]) + l, c, s);
cosines[at] = c;
sines[at] = s;
