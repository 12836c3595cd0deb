// One step of the trellis search: the kernel that each instruction level provides.
//
// A node is the 16 - bits low bits of a state. For every node `next` and every h < 2^bits the state
// s = h << (16 - bits) | next comes from node s >> bits:
//   after[next] = min over h of before[s >> bits] + edge(s)
// Rows of 16 nodes (32 of a coarse rate) are worked on together, h by h, against one row of the
// table. While 2^bits < 32 a coarse row has R = 32 / 2^bits predecessors for each h; its lanes are
// ordered so that they repeat with period R and load as one broadcast: node q * 2^bits + j of a row
// is lane j * R + q.
// At kEncodeTaggedBits edges are multiples of 2^bits and the low bits of a cost hold the h of its
// own node, so that the minimum says which predecessor won. At other rates costs are kept, and the
// trace finds the predecessor again.
//
// Range of costs of 32 bits: edges lie between -0.95e9 and 1.3e9 (2^30 for squares); a cost is at
// most kEncodeCap and the least cost of a row is never below the least edge. So base + edge fits.
#pragma once
#include "exl3/encode.h"

namespace exl3 {

constexpr int kEncodeBatch = 4;  // tiles that share each load of the table

struct EncodeStep {
  const int16_t* table;
  int bits;   // 4 to 8
  int count;  // tiles, 1..kEncodeBatch
  struct Tile {
    const int32_t* before;  // [nodes]
    int32_t* after;         // [nodes] cost less encode_shift(low), at most kEncodeCap
    uint16_t* choice;       // [nodes/16, bits]: bit i of the h of each lane. Tagged rate only
    int32_t low;            // in: the least of `before`; out: the least of `after`
    int16_t y[2];           // multipliers (tagged) or weight and 0
  } tile[kEncodeBatch];
};

struct EncodeCoarseStep {
  const int16_t* table;
  int bits;  // 1 to 3
  int count;
  struct Tile {
    const int16_t* before;  // [nodes]
    int16_t* after;         // [nodes] cost less the reference
    int16_t reference;
    int16_t y;
    bool wide;
  } tile[kEncodeBatch];
};

}  // namespace exl3
