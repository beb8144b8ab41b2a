// Stand-in for the header of MLX: metal_stdlib has these functions for bfloat.
#pragma once
