// What attention.cpp and the kernels of every instruction set share: plain data and function pointers, no code.
#pragma once

#include <cstddef>

#include "../params.h"

namespace detattn::cpu {

// One sequence of a call: its shape, where its rows stand in the tensors, and what its padding mask looks like.
struct SequencePlan {
  Sequence shape;
  int64_t index;                   // in the batch
  int64_t query_batch, query_row;  // query i is row query_row + i of batch entry query_batch
  int64_t key_batch, key_row;      // likewise, where keys are not paged
  bool holes;                      // some key inside the valid range is masked
};

// Per-row numbers that the backward needs, and where they are kept: [heads_q][query rows of all sequences].
struct RowStats {
  void *lse2, *shift;  // lse in powers of two; delta - dlse
  int64_t rows;
};

// Queries [first, first + queries) of the query heads [head, head + heads), which share one key head.
struct Tile {
  int64_t head, heads, first, queries;
};

// The kernels of one instruction set and dtype. Scratch is aligned to 64 bytes.
struct Kernels {
  size_t (*forward_scratch)(const FwdParams& p, int64_t rows);
  void (*forward_tile)(const FwdParams& p, const SequencePlan& s, const Tile& tile, void* scratch);
  // Rows [begin, end) of one head that belong to no sequence: out = 0 and lse = -inf, or a gradient of zero.
  void (*forward_unowned)(const FwdParams& p, int64_t head, int64_t begin, int64_t end);
  void (*zero_rows)(const MutableRows& rows, int32_t head_dim, int64_t batch, int64_t head, int64_t begin, int64_t end);

  // dq_rows: query rows whose dq is kept at once, group * queries for backward_fused, else 0.
  size_t (*backward_scratch)(const BwdParams& p, int64_t dq_rows);
  int64_t backward_tile_queries, backward_block_keys;
  // Row numbers of one sequence and head, and its part of the gradient of the head's sink.
  void (*backward_stats)(const BwdParams& p, const SequencePlan& s, int64_t head, const RowStats& stats, void* dsink);
  // dq, dk, dv of one sequence and key head in one sweep.
  void (*backward_fused)(const BwdParams& p, const SequencePlan& s, int64_t head_kv, const RowStats& stats,
                         void* scratch);
  // The same in independent parts: dk and dv of one block of keys, dq of one tile of queries.
  void (*backward_keys)(const BwdParams& p, const SequencePlan& s, int64_t head_kv, int64_t block,
                        const RowStats& stats, void* scratch);
  void (*backward_queries)(const BwdParams& p, const SequencePlan& s, int64_t head, int64_t tile, const RowStats& stats,
                           void* scratch);
  // dsinks of all heads from their parts [sequences][heads_q].
  void (*sum_dsinks)(const BwdParams& p, const void* parts, int64_t sequences);
};

}  // namespace detattn::cpu
