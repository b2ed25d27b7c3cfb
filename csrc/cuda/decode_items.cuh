// The work items of decode: one chunk for a tile of packed rows (queries x heads of a group) of one key head. An item's
// number leads to its sequence, rows and blocks without any look at other items.
#pragma once

#include "pipeline.cuh"
#include "rows.cuh"

namespace detattn {

// A work item: its sequence, key head, rows and blocks.
struct DecodeItem {
  SequenceView view;
  RowLimits limits;                   // of the tile's first query
  int32_t batch, head_kv, row, rows;  // packed rows [row, row + 8) of `rows`
  int32_t first_query;
  int32_t first, last;  // blocks
  int32_t begin, end;   // relative keys that some row of the tile sees
  int32_t chunks;       // of the sequence; 1: no merge follows
  int64_t slot;

  // Of row `r` of the tile. The division is slow, and most calls have one query a sequence.
  DETATTN_DEV int query(const FwdArgs& p, int r) const { return rows == p.group ? 0 : (row + r) / p.group; }
  DETATTN_DEV int head(const FwdArgs& p, int r) const { return head_kv * p.group + row + r - query(p, r) * p.group; }
};

// Chunk `chunk` for the packed rows from `row` on, whose limits are known. False: the sequence has no such chunk.
template <int kHeadDim>
DETATTN_DEV bool place_in_tile(const FwdArgs& p, const ChunkRange& chunks, int chunk, int head_kv, int row,
                               DecodeItem& x) {
  constexpr int kBlock = block_keys(kHeadDim);
  if (chunk >= chunks.count) return false;
  x.chunks = chunks.count;
  x.rows = static_cast<int>(x.view.sequence.queries) * p.group;
  x.head_kv = head_kv;
  x.row = row;
  x.first_query = x.query(p, 0);
  x.begin = x.limits.first(0);
  x.end = x.limits.past(x.query(p, min(kDecodeRows, x.rows - row) - 1) - x.first_query);
  const int from = max(x.begin, chunk_start(chunks.first + chunk)),
            to = min(x.end, chunk_start(chunks.first + chunk + 1));
  x.first = x.last = 0;
  if (to > from) {
    x.first = from / kBlock;
    x.last = (to + kBlock - 1) / kBlock;
  }
  return true;
}

// The same for row tile `tile`, counted over the key heads of the sequence.
template <int kHeadDim>
DETATTN_DEV bool place_item(const FwdArgs& p, const ChunkRange& chunks, int tile, int chunk, DecodeItem& x) {
  const Sequence& s = x.view.sequence;
  const int rows = static_cast<int>(s.queries) * p.group, tiles = (rows + kDecodeRows - 1) / kDecodeRows;
  const int head_kv = tiles == 1 ? tile : tile / tiles, row = (tile - head_kv * tiles) * kDecodeRows;
  x.limits = row_limits(p.mask, s, rows == p.group ? 0 : row / p.group);
  return place_in_tile<kHeadDim>(p, chunks, chunk, head_kv, row, x);
}

// False: a dense chunk that its sequence does not have; varlen: past the last item.
template <int kHeadDim>
DETATTN_DEV bool locate_item(const FwdArgs& p, int64_t item, DecodeItem& x) {
  if (item >= p.decode_items) return false;  // only malformed lengths lead past the bound
  uint32_t in_sequence;
  if (p.cu_seqlens_q) {
    Place place;
    if (!find_sequence<true>(p, item, place)) return false;
    x.batch = place.sequence;
    in_sequence = static_cast<uint32_t>(item - place.begin);
  } else {
    const uint32_t per_sequence = p.heads_kv * p.row_tiles * p.max_chunks;
    x.batch = static_cast<uint32_t>(item) / per_sequence;
    in_sequence = static_cast<uint32_t>(item) - x.batch * per_sequence;
  }
  x.slot = item;
  x.view = view_sequence(p, x.batch);
  const ChunkRange chunks = sequence_chunks(p.mask, x.view.sequence);
  const int per_tile = p.cu_seqlens_q ? chunks.count : p.max_chunks;
  const int tile = in_sequence / static_cast<uint32_t>(per_tile);
  return place_item<kHeadDim>(p, chunks, tile, in_sequence - tile * per_tile, x);
}

}  // namespace detattn
