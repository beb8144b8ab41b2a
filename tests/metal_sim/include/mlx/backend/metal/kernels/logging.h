// Stand-in for the header of MLX, which needs Metal's logging.
#pragma once
