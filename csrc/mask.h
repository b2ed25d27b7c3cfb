// Which keys a row sees. The one definition for the CPU and the CUDA kernels.
#pragma once

#include "contract.h"

namespace detattn {

struct KeyRange {
  int64_t begin, end;  // keys [begin, end); empty when end <= begin
};

// Windows in keys around the aligned key; negative means unbounded. `causal` is window right = 0.
struct Mask {
  int64_t left, right;
};

DETATTN_HD Mask make_mask(bool causal, int64_t window_left, int64_t window_right) {
  return {window_left < 0 ? -1 : window_left, causal ? 0 : (window_right < 0 ? -1 : window_right)};
}

// One sequence: its query count, its key count (alignment is bottom-right: query i faces key keys - queries + i), and
// the range of keys that are valid at all. `keys` counts buffer slots, padding included; `valid` lies inside [0, keys).
struct Sequence {
  int64_t queries, keys;
  KeyRange valid;
};

DETATTN_HD KeyRange visible_keys(const Mask& mask, const Sequence& s, int64_t query) {
  const int64_t aligned = query + s.keys - s.queries;
  KeyRange r = s.valid;
  if (mask.left >= 0 && aligned - mask.left > r.begin) r.begin = aligned - mask.left;
  if (mask.right >= 0 && aligned + mask.right + 1 < r.end) r.end = aligned + mask.right + 1;
  return r;
}

// The keys that at least one of the queries [first, last] may see: both limits grow with the query.
DETATTN_HD KeyRange visible_keys(const Mask& mask, const Sequence& s, int64_t first, int64_t last) {
  return {visible_keys(mask, s, first).begin, visible_keys(mask, s, last).end};
}

// The queries [begin, end) of a sequence that may see at least one of the keys [first, last].
DETATTN_HD KeyRange seeing_queries(const Mask& mask, const Sequence& s, int64_t first, int64_t last) {
  const int64_t shift = s.keys - s.queries;
  KeyRange r = {0, s.queries};
  if (mask.right >= 0 && first - mask.right - shift > r.begin) r.begin = first - mask.right - shift;
  if (mask.left >= 0 && last + mask.left - shift + 1 < r.end) r.end = last + mask.left - shift + 1;
  return r;
}

}  // namespace detattn
