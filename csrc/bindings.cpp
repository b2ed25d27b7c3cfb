// The raw ops behind the Python layer, on the LibTorch stable ABI: check what memory safety needs, fill the params,
// launch, raise. Compiled once for the CPU library and, with DETATTN_CUDA, once for the CUDA library.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "params.h"

#ifdef DETATTN_CUDA
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// Written by the build: one static_assert a constant of contract.py.
#include "contract_check.inc"

detattn::DType dtype_of(const Tensor& t, const char* op) {
  switch (t.scalar_type()) {
    case ScalarType::Half:
      return detattn::DType::kHalf;
    case ScalarType::BFloat16:
      return detattn::DType::kBFloat16;
    case ScalarType::Float:
      return detattn::DType::kFloat;
    case ScalarType::Double:
      return detattn::DType::kDouble;
    default:
      STD_TORCH_CHECK(false, op, ": q, k and v must be float16, bfloat16, float32 or float64");
  }
  return detattn::DType::kFloat;
}

ScalarType accumulate_type(detattn::DType d) {
  return d == detattn::DType::kDouble ? ScalarType::Double : ScalarType::Float;
}

// Set by tests: fresh outputs and workspaces then hold NaN, so that an element nobody writes is seen.
bool poison = false;

// Contiguous, on the device of `like`. The shim itself, since the wrapper over it costs 3 us more a tensor.
Tensor allocate(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= sizes[d] > 0 ? sizes[d] : 1;
  }
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const int32_t dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  dtype_code, device_type, like.get_device_index(), &handle));
  Tensor t(handle);
  if (poison) torch::stable::fill_(t, dtype == ScalarType::Byte ? 255.0 : std::numeric_limits<double>::quiet_NaN());
  return t;
}

Tensor allocate_like(const Tensor& t) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < t.dim(); ++d) sizes.push_back(t.size(d));
  return allocate(t, sizes, t.scalar_type());
}

// A stride of a dimension that holds at most one element says nothing; kernels get 0 there.
int64_t stride(const Tensor& t, int64_t dim) { return t.size(dim) > 1 ? t.stride(dim) : 0; }

void check_rows(const Tensor& t, int64_t rank, const Tensor& q, const char* op, const char* name) {
  STD_TORCH_CHECK(t.dim() == rank, op, ": ", name, " must have ", rank, " dimensions, got ", t.dim());
  STD_TORCH_CHECK(t.scalar_type() == q.scalar_type(), op, ": ", name, " must have the dtype of q");
  STD_TORCH_CHECK(t.get_device_index() == q.get_device_index() && t.is_cuda() == q.is_cuda(), op, ": ", name,
                  " must be on the device of q");
}

// Kernels read any strides but need the last dimension contiguous; what has it otherwise is copied.
Tensor unit_last_stride(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return last < 0 || t.size(last) <= 1 || t.stride(last) == 1 ? t : torch::stable::contiguous(t);
}
Optional unit_last_stride(const Optional& t) { return t ? Optional(unit_last_stride(*t)) : t; }

template <class R>
R rows(const Tensor& t, void* data, bool dense) {  // dense or paged [batch, ...], packed [row, head, dim]
  if (dense) return R{data, stride(t, 0), stride(t, 1), stride(t, 2)};
  if (t.dim() == 4) return R{data, stride(t, 0), stride(t, 2), stride(t, 1)};
  return R{data, 0, stride(t, 1), stride(t, 0)};
}
detattn::Rows in_rows(const Tensor& t, bool dense) {
  return rows<detattn::Rows>(t, const_cast<void*>(t.const_data_ptr()), dense);
}
detattn::MutableRows out_rows(const Tensor& t, bool dense) {
  return rows<detattn::MutableRows>(t, t.mutable_data_ptr(), dense);
}

const int32_t* indices(const Optional& t, int64_t rank, const Tensor& q, const char* op, const char* name) {
  if (!t) return nullptr;
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Int && t->dim() == rank, op, ": ", name, " must be int32 with ", rank,
                  " dimensions");
  STD_TORCH_CHECK(t->is_cuda() == q.is_cuda() && t->get_device_index() == q.get_device_index(), op, ": ", name,
                  " must be on the device of q");
  return static_cast<const int32_t*>(t->const_data_ptr());
}

struct Inputs {
  Tensor q, k, v;
  Optional key_padding_mask, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table;
  Inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& mask, const Optional& sinks,
         const Optional& cu_q, const Optional& cu_k, const Optional& used, const Optional& table)
      : q(unit_last_stride(q)),
        k(unit_last_stride(k)),
        v(unit_last_stride(v)),
        key_padding_mask(mask),
        sinks(unit_last_stride(sinks)),
        cu_seqlens_q(unit_last_stride(cu_q)),
        cu_seqlens_k(unit_last_stride(cu_k)),
        seqused_k(unit_last_stride(used)),
        block_table(unit_last_stride(table)) {}
  bool dense() const { return !cu_seqlens_q.has_value(); }
};

void fill(detattn::Problem& p, const Inputs& in, bool causal, double scale, int64_t window_left, int64_t window_right,
          double softcap, const char* op) {
  const bool dense = in.dense(), paged = in.block_table.has_value();
  const int64_t rank = dense ? 4 : 3, kv_rank = dense || paged ? 4 : 3;
  check_rows(in.q, rank, in.q, op, "q");
  check_rows(in.k, kv_rank, in.q, op, "k");
  check_rows(in.v, kv_rank, in.q, op, "v");
  p.dtype = dtype_of(in.q, op);
  const int64_t kv_head_dim = dense ? 1 : kv_rank - 2;
  p.heads_q = static_cast<int32_t>(in.q.size(1));
  p.heads_kv = static_cast<int32_t>(in.k.size(kv_head_dim));
  p.head_dim = static_cast<int32_t>(in.q.size(rank - 1));
  for (int64_t d = 0; d < kv_rank; ++d)
    STD_TORCH_CHECK(in.k.size(d) == in.v.size(d), op, ": k and v must have the same shape");
  STD_TORCH_CHECK(in.k.size(kv_rank - 1) == p.head_dim, op, ": q, k and v must have the same head dim");
  STD_TORCH_CHECK(p.head_dim >= 1 && p.head_dim <= detattn::kMaxHeadDim, op, ": head dim must be in 1..",
                  detattn::kMaxHeadDim, ", got ", p.head_dim);
  STD_TORCH_CHECK(p.heads_kv >= 1 ? p.heads_q % p.heads_kv == 0 : p.heads_q == 0, op, ": ", p.heads_q,
                  " query heads are not a multiple of ", p.heads_kv, " key heads");
  p.mask = detattn::make_mask(causal, window_left, window_right);
  p.scale = scale;
  p.softcap = softcap;
  p.q = in_rows(in.q, dense);
  p.k = in_rows(in.k, dense);
  p.v = in_rows(in.v, dense);
  p.cu_seqlens_q = indices(in.cu_seqlens_q, 1, in.q, op, "cu_seqlens_q");
  p.cu_seqlens_k = indices(in.cu_seqlens_k, 1, in.q, op, "cu_seqlens_k");
  p.seqused_k = indices(in.seqused_k, 1, in.q, op, "seqused_k");
  p.block_table = indices(in.block_table, 2, in.q, op, "block_table");
  p.table_batch = paged ? stride(*in.block_table, 0) : 0;
  p.num_pages = paged ? in.k.size(0) : 0;
  p.page_size = paged ? static_cast<int32_t>(in.k.size(1)) : 0;
  if (dense) {
    STD_TORCH_CHECK(!paged && !in.cu_seqlens_k && !in.seqused_k, op,
                    ": a dense call has no block_table and no lengths");
    STD_TORCH_CHECK(in.q.size(0) == in.k.size(0), op, ": q and k must have the same batch size");
    p.batch = static_cast<int32_t>(in.q.size(0));
    p.seqlen_q = in.q.size(2);
    p.seqlen_k = in.k.size(2);
  } else {
    STD_TORCH_CHECK(in.cu_seqlens_q->size(0) >= 1, op, ": cu_seqlens_q must hold batch + 1 offsets");
    STD_TORCH_CHECK(paged != in.cu_seqlens_k.has_value(), op, ": pass cu_seqlens_k, or block_table and seqused_k");
    STD_TORCH_CHECK(!paged || in.seqused_k.has_value(), op, ": block_table needs seqused_k");
    p.batch = static_cast<int32_t>(in.cu_seqlens_q->size(0) - 1);
    STD_TORCH_CHECK(paged || in.cu_seqlens_k->size(0) == p.batch + 1, op, ": cu_seqlens_k must hold batch + 1 offsets");
    STD_TORCH_CHECK(!in.seqused_k || in.seqused_k->size(0) == p.batch, op, ": seqused_k must hold batch lengths");
    STD_TORCH_CHECK(!paged || in.block_table->size(0) == p.batch, op, ": block_table must hold batch rows");
    p.seqlen_q = in.q.size(0);
    p.seqlen_k = paged ? in.block_table->size(1) * p.page_size : in.k.size(0);
  }
  p.key_padding_mask = nullptr;
  p.mask_batch = p.mask_key = 0;
  if (in.key_padding_mask) {
    const Tensor& m = *in.key_padding_mask;
    STD_TORCH_CHECK(dense && m.scalar_type() == ScalarType::Bool && m.dim() == 2 && m.size(0) == p.batch &&
                        m.size(1) == p.seqlen_k && m.get_device_index() == in.q.get_device_index(),
                    op, ": key_padding_mask must be bool [batch, keys] on the device of q, dense calls only");
    p.key_padding_mask = static_cast<const uint8_t*>(m.const_data_ptr());
    p.mask_batch = stride(m, 0);
    p.mask_key = stride(m, 1);
  }
  p.sinks = nullptr;
  if (in.sinks) {
    const Tensor& s = *in.sinks;
    STD_TORCH_CHECK(s.scalar_type() == accumulate_type(p.dtype) && s.dim() == 1 && s.size(0) == p.heads_q &&
                        s.get_device_index() == in.q.get_device_index(),
                    op, ": sinks must be contiguous, one accumulator-dtype logit per query head");
    p.sinks = s.const_data_ptr();
  }
}

#ifndef DETATTN_CUDA

// Every index a CPU kernel follows is read here first: the data is in reach, and a wild one must not become a wild
// read.
void check_offsets(const detattn::Problem& p, const char* op) {
  const auto check = [&](const int32_t* cu, int64_t rows, const char* name) {
    if (!cu) return;
    STD_TORCH_CHECK(cu[0] >= 0 && cu[p.batch] <= rows, op, ": ", name, " runs from ", cu[0], " to ", cu[p.batch],
                    ", but there are ", rows, " rows");
    for (int32_t b = 0; b < p.batch; ++b)
      STD_TORCH_CHECK(cu[b] <= cu[b + 1], op, ": ", name, " must not decrease, but goes from ", cu[b], " to ",
                      cu[b + 1], " at sequence ", b);
  };
  check(p.cu_seqlens_q, p.seqlen_q, "cu_seqlens_q");
  check(p.cu_seqlens_k, p.seqlen_k, "cu_seqlens_k");
  for (int32_t b = 0; p.seqused_k && b < p.batch; ++b) {
    const int64_t room = p.cu_seqlens_k ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b] : p.seqlen_k;
    STD_TORCH_CHECK(p.seqused_k[b] >= 0 && p.seqused_k[b] <= room, op, ": seqused_k is ", p.seqused_k[b],
                    " at sequence ", b, ", which has room for ", room, " keys");
    if (!p.block_table) continue;
    const int64_t pages = (p.seqused_k[b] + p.page_size - 1) / (p.page_size ? p.page_size : 1);
    for (int64_t i = 0; i < pages; ++i) {
      const int32_t page = p.block_table[b * p.table_batch + i];
      STD_TORCH_CHECK(page >= 0 && page < p.num_pages, op, ": block_table names page ", page, " at sequence ", b,
                      ", entry ", i, ", but there are ", p.num_pages, " pages");
    }
  }
}

void parallel_for(int64_t count, void (*body)(void*, int64_t, int64_t), void* context) {
  torch::stable::parallel_for(0, count, 1, [=](int64_t begin, int64_t end) { body(context, begin, end); });
}

void launch_forward(const detattn::FwdParams& p, const Tensor&, const char* op) {
  check_offsets(p, op);
  detattn::cpu_forward(p, parallel_for);
}

void launch_backward(const detattn::BwdParams& p, const Tensor& q, const char* op) {
  check_offsets(p, op);
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  const size_t bytes = detattn::cpu_backward_workspace(p, threads);
  Tensor workspace = allocate(q, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  detattn::cpu_backward(p, parallel_for, threads, workspace.mutable_data_ptr());
}

#else

cudaStream_t current_stream(int32_t device) {
  // Looked up at the first call: the library must load next to a PyTorch that has no CUDA, and PyTorch's own libraries
  // are not in the global symbol scope.
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const Getter getter = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* symbol = torch_cuda ? dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream") : nullptr;
    STD_TORCH_CHECK(symbol, "detattn: this PyTorch has no CUDA support");
    return reinterpret_cast<Getter>(symbol);
  }();
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(getter(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

int multiprocessors(int device) {
  int count = 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

void raise_cuda(const detattn::Problem& p, int device, int code, const char* op) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  STD_TORCH_CHECK(false, op, ": ", detattn::cuda_error_text(code), " (batch ", p.batch, ", heads ", p.heads_q, "/",
                  p.heads_kv, ", queries ", p.seqlen_q, ", keys ", p.seqlen_k, ", head dim ", p.head_dim,
                  ", compute capability ", major, ".", minor, ")");
}

void launch_forward(const detattn::FwdParams& p, const Tensor& q, const char* op) {
  const int device = q.get_device_index(), sms = multiprocessors(device);
  const size_t bytes = detattn::cuda_forward_workspace(p, sms);
  Tensor workspace = allocate(q, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  const int code = detattn::cuda_forward(p, workspace.mutable_data_ptr(), current_stream(device), device, sms);
  if (code) raise_cuda(p, device, code, op);
}

void launch_backward(const detattn::BwdParams& p, const Tensor& q, const char* op) {
  const int device = q.get_device_index(), sms = multiprocessors(device);
  const size_t bytes = detattn::cuda_backward_workspace(p, sms);
  Tensor workspace = allocate(q, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  const int code = detattn::cuda_backward(p, workspace.mutable_data_ptr(), current_stream(device), device, sms);
  if (code) raise_cuda(p, device, code, op);
}

#endif

struct Guard {
#ifdef DETATTN_CUDA
  torch::stable::accelerator::DeviceGuard guard;
  explicit Guard(const Tensor& t) : guard(t.get_device_index()) {}
#else
  explicit Guard(const Tensor&) {}
#endif
};

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, Optional key_padding_mask, Optional sinks,
                                   Optional cu_seqlens_q, Optional cu_seqlens_k, Optional seqused_k,
                                   Optional block_table, bool causal, double scale, int64_t window_left,
                                   int64_t window_right, double softcap) {
  const char* op = cu_seqlens_q ? "detattn::attention_varlen" : "detattn::attention";
  const Inputs in(q, k, v, key_padding_mask, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table);
  detattn::FwdParams p{};
  fill(p, in, causal, scale, window_left, window_right, softcap, op);
  const Guard guard(q);
  const bool dense = in.dense();
  Tensor out = allocate_like(q);
  Tensor lse = dense ? allocate(q, {p.batch, p.heads_q, p.seqlen_q}, accumulate_type(p.dtype))
                     : allocate(q, {p.heads_q, p.seqlen_q}, accumulate_type(p.dtype));
  p.out = out_rows(out, dense);
  p.lse = {lse.mutable_data_ptr(), dense ? p.heads_q * p.seqlen_q : 0, p.seqlen_q, 1};
  if (p.seqlen_q * p.heads_q != 0 && (!dense || p.batch != 0)) launch_forward(p, q, op);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Optional dout, Optional dlse, Tensor q, Tensor k, Tensor v,
                                                    Tensor out, Tensor lse, Optional key_padding_mask, Optional sinks,
                                                    Optional cu_seqlens_q, Optional cu_seqlens_k, Optional seqused_k,
                                                    bool causal, double scale, int64_t window_left,
                                                    int64_t window_right, double softcap) {
  const char* op = cu_seqlens_q ? "detattn::attention_varlen_backward" : "detattn::attention_backward";
  const Inputs in(q, k, v, key_padding_mask, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, std::nullopt);
  detattn::BwdParams p{};
  fill(p, in, causal, scale, window_left, window_right, softcap, op);
  const Guard guard(q);
  const bool dense = in.dense();
  const auto check_like_q = [&](const Tensor& t, const char* name) {
    check_rows(t, q.dim(), q, op, name);
    for (int64_t d = 0; d < q.dim(); ++d)
      STD_TORCH_CHECK(t.size(d) == q.size(d), op, ": ", name, " must have the shape of q");
  };
  out = unit_last_stride(out);
  dout = unit_last_stride(dout);
  check_like_q(out, "out");
  p.out = in_rows(out, dense);
  if (dout) {
    check_like_q(*dout, "dout");
    p.dout = in_rows(*dout, dense);
  }
  const auto lse_rows = [&](const Tensor& t, const char* name) {
    const int64_t rank = dense ? 3 : 2;
    STD_TORCH_CHECK(t.dim() == rank && t.scalar_type() == accumulate_type(p.dtype) && t.size(rank - 1) == p.seqlen_q &&
                        t.size(rank - 2) == p.heads_q && (!dense || t.size(0) == p.batch) &&
                        t.get_device_index() == q.get_device_index(),
                    op, ": ", name, " must have the shape and dtype of lse");
    return detattn::Rows{t.const_data_ptr(), dense ? stride(t, 0) : 0, stride(t, rank - 2), stride(t, rank - 1)};
  };
  p.lse = lse_rows(lse, "lse");
  if (dlse) p.dlse = lse_rows(*dlse, "dlse");
  Tensor dq = allocate_like(q), dk = allocate_like(k), dv = allocate_like(v);
  Tensor dsinks = allocate(q, {sinks ? p.heads_q : 0}, accumulate_type(p.dtype));
  p.dq = out_rows(dq, dense);
  p.dk = out_rows(dk, dense);
  p.dv = out_rows(dv, dense);
  p.dsinks = sinks ? dsinks.mutable_data_ptr() : nullptr;
  launch_backward(p, q, op);
  return {dq, dk, dv, dsinks};
}

#ifndef DETATTN_CUDA
// The constants of contract.h in the order of contract.constants(); the Python layer compares them on loading.
std::vector<double> contract() {
  std::vector<double> flat = {detattn::kContractVersion, detattn::kMaxHeadDim,    detattn::kLazyThreshold,
                              detattn::kBlockKeys,       detattn::kBlockKeysWide, detattn::kBlockWideAbove,
                              detattn::kChunkSteps};
  for (const auto& step : detattn::kChunks.step) {
    flat.push_back(static_cast<double>(step.end));
    flat.push_back(static_cast<double>(step.keys));
  }
  return flat;
}
#endif

// A setting a library has for itself: the CPU and the CUDA library each register theirs.
bool poison_allocations(bool on) {
  const bool before = poison;
  poison = on;
  return before;
}

}  // namespace

#ifndef DETATTN_CUDA
STABLE_TORCH_LIBRARY(detattn_C, m) {
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor? key_padding_mask, Tensor? sinks, Tensor? cu_seqlens_q, "
      "Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? block_table, bool causal, float scale, int window_left, "
      "int window_right, float softcap) -> (Tensor, Tensor)");
  m.def(
      "backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? key_padding_mask, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
      "bool causal, float scale, int window_left, int window_right, float softcap) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def("contract() -> float[]");
  m.def("poison_cpu(bool on) -> bool");
  m.def("poison_cuda(bool on) -> bool");
}
STABLE_TORCH_LIBRARY_IMPL(detattn_C, CompositeExplicitAutograd, m) {
  m.impl("contract", TORCH_BOX(&contract));
  m.impl("poison_cpu", TORCH_BOX(&poison_allocations));
}
STABLE_TORCH_LIBRARY_IMPL(detattn_C, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}
#else
STABLE_TORCH_LIBRARY_IMPL(detattn_C, CompositeExplicitAutograd, m) {
  m.impl("poison_cuda", TORCH_BOX(&poison_allocations));
}
STABLE_TORCH_LIBRARY_IMPL(detattn_C, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}
#endif
