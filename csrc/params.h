// What the bindings hand to a kernel: pointers, strides in elements, sizes, the mask. Kernels know no torch.
#pragma once

#include <cstddef>

#include "mask.h"

namespace detattn {

enum class DType : int32_t { kHalf = 0, kBFloat16 = 1, kFloat = 2, kDouble = 3 };

// Rows of a tensor whose last dimension is contiguous. Dense: element (b, h, i, d) at b*batch + h*head + i*row + d.
// Varlen: row i of the packed tensor at h*head + i*row + d (batch is unused). Paged K/V: slot i of page p at
// p*batch + h*head + i*row + d.
struct Rows {
  const void* data;
  int64_t batch, head, row;
};
struct MutableRows {
  void* data;
  int64_t batch, head, row;
};

struct Problem {
  DType dtype;
  int32_t batch, heads_q, heads_kv, head_dim;
  // Dense: the lengths. Varlen: rows of the packed q and k tensors (rows past cu_seqlens[batch] belong to nobody).
  // Paged: seqlen_k is the capacity of a block-table row (pages * page_size).
  int64_t seqlen_q, seqlen_k;
  Mask mask;
  double scale, softcap;  // softcap 0: none

  Rows q, k, v;
  const uint8_t* key_padding_mask;  // [batch, seqlen_k], 1 = keep; null: all. Dense only.
  int64_t mask_batch, mask_key;     // its strides
  const void* sinks;                // [heads_q], fp32 (fp64 for kDouble); null: none

  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // [batch + 1]; both null: dense. cu_seqlens_k is null when paged.
  const int32_t* seqused_k;                    // [batch]; null: all keys of the sequence
  const int32_t* block_table;                  // [batch, table_batch >= pages]; null: not paged
  int64_t table_batch, num_pages;
  int32_t page_size;
};

// lse (and dlse): row i of head h of sequence b at b*batch + h*head + i*row; fp32 (fp64 for kDouble).
struct FwdParams : Problem {
  MutableRows out, lse;
};

struct BwdParams : Problem {
  Rows out, dout, lse, dlse;  // dout.data, dlse.data may be null: zero
  MutableRows dq, dk, dv;     // dense in the shape of q, k, v; every element is written
  void* dsinks;               // [heads_q] like sinks; null when sinks is null
};

// Runs body(context, begin, end) over [0, count) in any number of threads.
using ParallelFor = void (*)(int64_t count, void (*body)(void* context, int64_t begin, int64_t end), void* context);

// Scratch memory comes from the caller; the kernels say how many bytes they want.
size_t cpu_backward_workspace(const BwdParams& p, int threads);
void cpu_forward(const FwdParams& p, ParallelFor parallel_for);
void cpu_backward(const BwdParams& p, ParallelFor parallel_for, int threads, void* workspace);

// CUDA (sm_90a). Scratch bytes the call wants (0: none), linear in the sizes of the tensors; uninitialised memory will
// do.
size_t cuda_forward_workspace(const FwdParams& p, int sms);
size_t cuda_backward_workspace(const BwdParams& p, int sms);
// 0, or a code for cuda_error_text. Launches on `stream` of the current device; never synchronises, never allocates.
int cuda_forward(const FwdParams& p, void* workspace, void* stream, int device, int sms);
int cuda_backward(const BwdParams& p, void* workspace, void* stream, int device, int sms);
const char* cuda_error_text(int code);

}  // namespace detattn
