// Entry points of the CPU backend: picks the instruction set, plans the sequences of a call, and spreads independent
// tasks over threads. Nothing here can move a bit: a task's result does not depend on how the work was cut.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

#include "plan.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace detattn {

namespace baseline {
cpu::Kernels kernels(DType dtype);
}
#if defined(__x86_64__)
namespace avx2 {
cpu::Kernels kernels(DType dtype);
}
namespace avx512 {
cpu::Kernels kernels(DType dtype);
}
#endif

namespace {

using cpu::Kernels;
using cpu::RowStats;
using cpu::SequencePlan;

Kernels select_kernels(DType dtype) {
#if defined(__x86_64__)
  const bool fma = __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return avx512::kernels(dtype);
  }
  if (fma && __builtin_cpu_supports("avx2")) return avx2::kernels(dtype);
#endif
  return baseline::kernels(dtype);
}

// Round to nearest, subnormals kept, whatever the calling thread was set to.
class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
#elif defined(__aarch64__)
  FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~FloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;
};

constexpr size_t kAlignment = 64;
constexpr size_t align_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Runs tasks [0, count), started in ascending order, on `workers`: make_task(worker) is what one of them calls with the
// number of a task. Each takes the next one that nobody has begun, so uneven tasks and busy cores balance out.
template <class MakeTask>
void for_each_task(ParallelFor parallel_for, int64_t count, int64_t workers, const MakeTask& make_task) {
  struct Queue {
    std::atomic<int64_t> next;
    int64_t count;
    const MakeTask& make_task;
  } queue{{0}, count, make_task};
  const auto body = [](void* context, int64_t begin, int64_t) {
    Queue& q = *static_cast<Queue*>(context);
    const FloatEnvironment environment;
    const auto task = q.make_task(begin);
    for (int64_t i; (i = q.next.fetch_add(1, std::memory_order_relaxed)) < q.count;) task(i);
  };
  if (count > 0) parallel_for(std::min(workers, count), body, &queue);
}

SequencePlan plan_sequence(const Problem& p, int64_t b) {
  SequencePlan s = {};
  s.index = b;
  s.query_batch = p.cu_seqlens_q ? 0 : b;
  s.query_row = p.cu_seqlens_q ? p.cu_seqlens_q[b] : 0;
  s.shape.queries = p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : p.seqlen_q;
  s.key_batch = p.cu_seqlens_k ? 0 : b;
  s.key_row = p.cu_seqlens_k ? p.cu_seqlens_k[b] : 0;
  s.shape.keys = p.cu_seqlens_k ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b] : p.seqlen_k;
  if (p.seqused_k) s.shape.keys = std::clamp<int64_t>(p.seqused_k[b], 0, s.shape.keys);
  s.shape.valid = {0, s.shape.keys};
  if (p.key_padding_mask) {
    const uint8_t* mask = p.key_padding_mask + b * p.mask_batch;
    int64_t first = s.shape.keys, last = -1, kept = 0;
    for (int64_t j = 0; j < s.shape.keys; ++j) {
      if (!mask[j * p.mask_key]) continue;
      first = std::min(first, j);
      last = j;
      ++kept;
    }
    s.shape.valid = {first, last + 1};
    s.holes = kept > 0 && kept < last + 1 - first;
  }
  return s;
}

// The sequences of a call, the costliest first.
std::vector<SequencePlan> plan_sequences(const Problem& p) {
  std::vector<SequencePlan> plans;
  for (int64_t b = 0; b < p.batch; ++b) plans.push_back(plan_sequence(p, b));
  std::stable_sort(plans.begin(), plans.end(), [](const SequencePlan& x, const SequencePlan& y) {
    return x.shape.queries * x.shape.keys > y.shape.queries * y.shape.keys;
  });
  return plans;
}

// Numbers the pieces of all sequences, and finds a piece by its number.
class Pieces {
 public:
  template <class Count>
  Pieces(const std::vector<SequencePlan>& plans, const Count& count) : plans_(plans) {
    for (const SequencePlan& s : plans) {
      first_.push_back(total_);
      total_ += count(s);
    }
  }
  int64_t total() const { return total_; }
  struct Piece {
    const SequencePlan& sequence;
    int64_t index;
  };
  Piece operator[](int64_t i) const {
    const size_t s = std::upper_bound(first_.begin(), first_.end(), i) - first_.begin() - 1;
    return {plans_[s], i - first_[s]};
  }

 private:
  const std::vector<SequencePlan>& plans_;
  std::vector<int64_t> first_;
  int64_t total_ = 0;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls zero(begin, end) for the rows of a packed tensor that belong to no sequence.
template <class Zero>
void for_unowned(const int32_t* cu_seqlens, const int32_t* used, int64_t batch, int64_t rows, const Zero& zero) {
  zero(0, cu_seqlens[0]);
  for (int64_t b = 0; used && b < batch; ++b) {
    const int64_t length = cu_seqlens[b + 1] - cu_seqlens[b];
    zero(cu_seqlens[b] + std::clamp<int64_t>(used[b], 0, length), cu_seqlens[b + 1]);
  }
  zero(cu_seqlens[batch], rows);
}

// Heads and queries of a forward tile: enough rows that packing the keys is cheap beside using them, fewer where that
// would leave threads without work.
struct TileShape {
  int64_t heads, queries, longest = 1;

  TileShape(const Problem& p, const std::vector<SequencePlan>& plans) : heads(p.heads_q / p.heads_kv) {
    constexpr int64_t kRows = 192, kFewRows = 48, kFewHeads = 8, kTasks = 16;
    int64_t rows = kRows, total = 0;
    for (const SequencePlan& s : plans) {
      longest = std::max(longest, s.shape.queries);
      total += s.shape.queries * p.heads_q;
    }
    while (rows > kFewRows && total < rows * kTasks) rows /= 2;
    while (heads > kFewHeads && total < heads * kTasks) heads = ceil_div(heads, 2);
    queries = std::clamp<int64_t>(rows / heads, 1, longest);
  }
};

struct Scratch {
  explicit Scratch(size_t bytes) : data(std::aligned_alloc(kAlignment, align_up(bytes))) {
    if (data == nullptr) throw std::bad_alloc();
  }
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* const data;
};

// How the memory of a backward is laid out, and which of the two schedules it runs.
struct BackwardPlan {
  std::vector<SequencePlan> sequences;
  int64_t stat_rows, workers;
  bool fused;
  size_t stat_bytes, dsink_bytes, scratch_bytes;

  BackwardPlan(const BwdParams& p, const Kernels& kernels, int threads) : sequences(plan_sequences(p)) {
    const size_t size = p.dtype == DType::kDouble ? sizeof(double) : sizeof(float);
    stat_rows = p.cu_seqlens_q ? p.seqlen_q : p.batch * p.seqlen_q;
    stat_bytes = align_up(stat_rows * p.heads_q * size);
    dsink_bytes = align_up(static_cast<size_t>(p.batch) * p.heads_q * size);

    // One sweep does five products for seven, but has only as many tasks as there are key heads.
    double total = 0, largest = 0;
    int64_t longest = 0;
    for (const SequencePlan& s : sequences) {
      const double cost = static_cast<double>(s.shape.queries) * static_cast<double>(s.shape.keys);
      total += cost;
      largest = std::max(largest, cost);
      longest = std::max(longest, s.shape.queries);
    }
    const int64_t tasks = static_cast<int64_t>(sequences.size()) * p.heads_kv;
    const double even = total * p.heads_kv / threads;
    const double rounds = std::max(largest * ceil_div(tasks, threads), even);
    fused = 5 * std::max(largest, std::min(rounds, even + largest)) <= 7 * even;
    workers = fused ? std::clamp<int64_t>(tasks, 1, threads) : threads;
    scratch_bytes = align_up(kernels.backward_scratch(p, fused ? p.heads_q / p.heads_kv * longest : 0));
  }

  size_t bytes() const { return kAlignment + 2 * stat_bytes + dsink_bytes + workers * scratch_bytes; }
};

}  // namespace

void cpu_forward(const FwdParams& p, ParallelFor parallel_for) {
  const Kernels kernels = select_kernels(p.dtype);
  const std::vector<SequencePlan> plans = plan_sequences(p);
  const TileShape shape(p, plans);
  const int64_t group = p.heads_q / p.heads_kv, head_tiles = ceil_div(group, shape.heads);
  const size_t scratch_bytes = kernels.forward_scratch(p, shape.heads * shape.queries);
  const Pieces tiles(
      plans, [&](const SequencePlan& s) { return ceil_div(s.shape.queries, shape.queries) * head_tiles * p.heads_kv; });

  for_each_task(parallel_for, tiles.total(), tiles.total(), [&](int64_t) {
    return [&, scratch = Scratch(scratch_bytes)](int64_t i) {
      // Last queries first: under a causal mask they see the most.
      const auto [s, index] = tiles[i];
      const int64_t query_tiles = ceil_div(s.shape.queries, shape.queries);
      const int64_t first = (query_tiles - 1 - index % query_tiles) * shape.queries;
      const int64_t part = index / query_tiles % head_tiles * shape.heads;
      const int64_t head_kv = index / query_tiles / head_tiles;
      kernels.forward_tile(p, s,
                           {head_kv * group + part, std::min(shape.heads, group - part), first,
                            std::min(shape.queries, s.shape.queries - first)},
                           scratch.data);
    };
  });
  if (p.cu_seqlens_q) {
    for_unowned(p.cu_seqlens_q, nullptr, p.batch, p.seqlen_q, [&](int64_t begin, int64_t end) {
      for (int64_t h = 0; h < p.heads_q; ++h) kernels.forward_unowned(p, h, begin, end);
    });
  }
}

size_t cpu_backward_workspace(const BwdParams& p, int threads) {
  return BackwardPlan(p, select_kernels(p.dtype), threads).bytes();
}

void cpu_backward(const BwdParams& p, ParallelFor parallel_for, int threads, void* workspace) {
  const FloatEnvironment environment;
  const Kernels kernels = select_kernels(p.dtype);
  const BackwardPlan plan(p, kernels, threads);
  char* memory = reinterpret_cast<char*>(align_up(reinterpret_cast<uintptr_t>(workspace)));
  const RowStats stats = {memory, memory + plan.stat_bytes, plan.stat_rows};
  char* dsinks = memory + 2 * plan.stat_bytes;
  char* scratch = dsinks + plan.dsink_bytes;
  const int64_t dsink_size = p.dtype == DType::kDouble ? sizeof(double) : sizeof(float);

  // run(piece, scratch) for every piece.
  const auto for_each = [&](const Pieces& pieces, const auto& run) {
    for_each_task(parallel_for, pieces.total(), plan.workers, [&](int64_t worker) {
      return [&, memory = scratch + worker * plan.scratch_bytes](int64_t i) { run(pieces[i], memory); };
    });
  };

  const Pieces heads(plan.sequences, [&](const SequencePlan&) { return p.heads_q; });
  for_each(heads, [&](Pieces::Piece piece, void*) {
    const auto [s, head] = piece;
    kernels.backward_stats(p, s, head, stats, dsinks + (s.index * p.heads_q + head) * dsink_size);
  });
  if (p.dsinks) kernels.sum_dsinks(p, dsinks, p.batch);

  if (plan.fused) {
    const Pieces key_heads(plan.sequences, [&](const SequencePlan&) { return p.heads_kv; });
    for_each(key_heads, [&](Pieces::Piece piece, void* memory) {
      kernels.backward_fused(p, piece.sequence, piece.index, stats, memory);
    });
  } else {
    const Pieces blocks(plan.sequences, [&](const SequencePlan& s) {
      return ceil_div(s.shape.keys, kernels.backward_block_keys) * p.heads_kv;
    });
    for_each(blocks, [&](Pieces::Piece piece, void* memory) {
      const auto [s, index] = piece;
      kernels.backward_keys(p, s, index % p.heads_kv, index / p.heads_kv, stats, memory);
    });
    const Pieces tiles(plan.sequences, [&](const SequencePlan& s) {
      return ceil_div(s.shape.queries, kernels.backward_tile_queries) * p.heads_q;
    });
    for_each(tiles, [&](Pieces::Piece piece, void* memory) {
      const auto [s, index] = piece;
      const int64_t last = ceil_div(s.shape.queries, kernels.backward_tile_queries) - 1;
      kernels.backward_queries(p, s, index % p.heads_q, last - index / p.heads_q, stats, memory);
    });
  }

  if (p.cu_seqlens_q) {
    for_unowned(p.cu_seqlens_q, nullptr, p.batch, p.seqlen_q, [&](int64_t begin, int64_t end) {
      for (int64_t h = 0; h < p.heads_q; ++h) kernels.zero_rows(p.dq, p.head_dim, 0, h, begin, end);
    });
  }
  const auto zero_keys = [&](int64_t batch, int64_t begin, int64_t end) {
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      kernels.zero_rows(p.dk, p.head_dim, batch, h, begin, end);
      kernels.zero_rows(p.dv, p.head_dim, batch, h, begin, end);
    }
  };
  if (p.cu_seqlens_k) {
    for_unowned(p.cu_seqlens_k, p.seqused_k, p.batch, p.seqlen_k,
                [&](int64_t begin, int64_t end) { zero_keys(0, begin, end); });
  } else {
    for (const SequencePlan& s : plan.sequences) zero_keys(s.index, s.shape.keys, p.seqlen_k);
  }
}

}  // namespace detattn
