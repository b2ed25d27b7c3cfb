// Where the tiles and blocks of the backward stand. Tiles of queries are anchored at the first query that sees a key,
// blocks of keys at the first valid key, so both are functions of the sequence alone.
#pragma once

#include "bwd.h"
#include "problem.cuh"

namespace detattn {

// The tiles of a sequence. Row r is query `first + r`; first <= 0, and rows below -first do not exist.
struct QueryTiles {
  int32_t first, rows, tiles;
  int32_t low, high, end;  // row r sees the relative keys [max(low + r, 0), min(high + r, end))
  DETATTN_DEV int32_t tile_first_key(int tile) const { return max(low + max(kBwdRows * tile, -first), 0); }
  DETATTN_DEV int32_t tile_past_key(int tile) const {
    return min(high + min(kBwdRows * tile + kBwdRows, rows) - 1, end);
  }
};

DETATTN_DEV QueryTiles query_tiles(const Mask& mask, const Sequence& s) {
  constexpr int64_t kFar = int64_t{1} << 30;  // no shorter than a sequence
  const int64_t shift = s.keys - s.queries - s.valid.begin;
  const int anchor = mask.right < 0 ? 0 : static_cast<int>(clamp64(-mask.right - shift, 0, s.queries) % kBwdRows);
  QueryTiles t;
  t.first = anchor ? anchor - kBwdRows : 0;
  t.rows = static_cast<int32_t>(s.queries) - t.first;
  t.tiles = s.queries > 0 ? (t.rows + kBwdRows - 1) / kBwdRows : 0;
  const int64_t aligned = t.first + shift;
  t.low = static_cast<int32_t>(mask.left < 0 ? -kFar : clamp64(aligned - mask.left, -kFar, kFar));
  t.high = static_cast<int32_t>(mask.right < 0 ? kFar : clamp64(aligned + mask.right + 1, -kFar, kFar));
  t.end = static_cast<int32_t>(s.valid.end > s.valid.begin ? s.valid.end - s.valid.begin : 0);
  return t;
}

// A tile of one head, from its number.
struct TilePlace {
  int32_t sequence, head, tile;
  SequenceView view;
  QueryTiles tiles;
};
DETATTN_DEV int64_t first_tile(const BwdArgs& p, int sequence) {
  return p.cu_seqlens_q ? p.tile_begin[sequence] : int64_t{sequence} * p.heads_q * p.tiles_per_head;
}
DETATTN_DEV int tiles_per_head(const BwdArgs& p, const QueryTiles& t) {
  return p.cu_seqlens_q ? t.tiles : p.tiles_per_head;
}
// False where no such tile is. All lanes of a warp call it.
DETATTN_DEV bool find_tile(const BwdArgs& p, int64_t number, TilePlace& x) {
  if (p.cu_seqlens_q) {
    if (number >= p.tile_begin[p.batch]) return false;
    x.sequence = warp_search(p.tile_begin, p.batch, number);
  } else {
    x.sequence = static_cast<int32_t>(number / (int64_t{p.heads_q} * p.tiles_per_head));
  }
  x.view = view_sequence(p, x.sequence);
  x.tiles = query_tiles(p.mask, x.view.sequence);
  const int per_head = tiles_per_head(p, x.tiles);
  const int in_sequence = static_cast<int>(number - first_tile(p, x.sequence));
  x.head = in_sequence / per_head;
  x.tile = in_sequence - x.head * per_head;
  return x.tile < x.tiles.tiles;
}

// One block of keys of one key head, and the tiles [tile_begin, tile_end) that see it.
struct BwdJob {
  SequenceView view;
  QueryTiles tiles;
  int32_t sequence, head_kv;
  int32_t key, keys;  // the first key, relative; how many are valid
  int32_t tile_begin, tile_end;
};
// No keys where the sequence has no such block. All lanes of a warp call it with the same x. Whoever adds to dq before
// us has a smaller number: blocks ascend inside a head.
template <int kKeys>
DETATTN_DEV void find_job(const BwdArgs& p, uint32_t number, BwdJob& x) {
  uint32_t in_section = number, heads = p.batch * p.heads_kv, section_first = 0;
  if (p.cu_seqlens_q) {
    if (number >= p.job_begin[p.batch]) {
      x.keys = 0;
      return;
    }
    const int rank = warp_search(p.job_begin, p.batch, number);
    x.sequence = p.order[rank];
    in_section = number - static_cast<uint32_t>(p.job_begin[rank]);
    heads = p.heads_kv;
  } else {
    const uint32_t per_section = p.heads_per_section * p.blocks_per_head, section = number / per_section;
    in_section = number - section * per_section;
    section_first = section * p.heads_per_section;
    heads = min(static_cast<uint32_t>(p.heads_per_section), heads - section_first);
  }
  const uint32_t block = in_section / heads, head = section_first + in_section - block * heads;
  if (!p.cu_seqlens_q) x.sequence = head / p.heads_kv;
  x.head_kv = p.cu_seqlens_q ? head : head - x.sequence * p.heads_kv;
  x.view = view_sequence(p, x.sequence);
  x.tiles = query_tiles(p.mask, x.view.sequence);
  x.key = block * kKeys;
  x.keys = min(x.tiles.end - x.key, kKeys);
  const int begin = max(x.key - x.tiles.high + 1, -x.tiles.first);
  const int end = min(x.key + x.keys - x.tiles.low, x.tiles.rows);
  x.tile_begin = begin < end ? begin / kBwdRows : 0;
  x.tile_end = begin < end ? (end + kBwdRows - 1) / kBwdRows : 0;
}

DETATTN_DEV bool key_bit(const BwdArgs& p, int sequence, int key) {
  return (p.key_bits[sequence * p.key_words + (key >> 5)] >> (key & 31)) & 1;
}

// Walks the tiles that see a block in the order in which they join dk and dv: tiles descending, inside a tile the heads
// of the group ascending. Every block of a head walks the same way, so none has to wait for the end of a longer one.
struct BwdWalk {
  int32_t tile, head, left, group;  // `head` in the group
  DETATTN_DEV BwdWalk(const BwdArgs& p, const BwdJob& x)
      : tile(x.tile_end - 1), head(0), left((x.tile_end - x.tile_begin) * p.group), group(p.group) {}
  DETATTN_DEV void advance() {
    --left;
    if (++head == group) {
      head = 0;
      --tile;
    }
  }
  DETATTN_DEV int64_t number(const BwdArgs& p, const BwdJob& x) const {
    return first_tile(p, x.sequence) + int64_t{x.head_kv * group + head} * tiles_per_head(p, x.tiles) + tile;
  }
};

}  // namespace detattn
