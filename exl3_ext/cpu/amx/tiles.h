// The tile registers as every kernel here uses them: eight of 16 rows of 64 bytes.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "cpu/avx512/states.h"

namespace exl3::amx {

constexpr int kTileBytes = 1024;

struct alignas(64) TileConfig {
  uint8_t palette, start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Loads, stores and products of tiles are volatile assembly that the compiler does not know to
// touch memory.
EXL3_STATIC void memory_barrier() { __asm__ volatile("" ::: "memory"); }

EXL3_STATIC void configure_tiles() {
  TileConfig config{};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  memory_barrier();
  _tile_loadconfig(&config);
}

}  // namespace exl3::amx
