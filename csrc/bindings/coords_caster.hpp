// Coords cross the border as sequences of int one way and as tuples the other.
//
// A specialization of pybind11's type_caster, so that bindings have Coords in their signatures. It
// must be visible in every file that does (bindings.hpp): else two files would have different
// casters for one type.
#pragma once

#include <pybind11/pybind11.h>

#include "core/index.hpp"

namespace pybind11::detail {

template <>
struct type_caster<pydist::Coords> {
 public:
  PYBIND11_TYPE_CASTER(pydist::Coords,
                       io_name("collections.abc.Sequence[typing.SupportsInt]", "tuple[int, ...]"));

  // Accepts any sequence but text, of integers or of objects with __index__. More than eight items
  // are refused by Coords, with their number. False makes pybind11 try the next overload, and raise
  // TypeError after the last one. The cut at 2^20 keeps a length that no int holds from wrapping.
  bool load(handle source, bool) {
    if (!isinstance<sequence>(source) || isinstance<str>(source) || isinstance<bytes>(source)) {
      return false;
    }
    const auto items = reinterpret_borrow<sequence>(source);
    value = pydist::Coords(static_cast<int>(std::min<std::size_t>(items.size(), 1 << 20)));
    for (int dim = 0; dim < value.ndim(); ++dim) {
      make_caster<pydist::index_t> item;
      if (!item.load(object(items[static_cast<std::size_t>(dim)]), true)) return false;
      value[dim] = cast_op<pydist::index_t>(item);
    }
    return true;
  }

  // A new tuple, which the caller owns.
  static handle cast(const pydist::Coords& coords, return_value_policy, handle) {
    tuple result(static_cast<std::size_t>(coords.ndim()));
    for (int dim = 0; dim < coords.ndim(); ++dim) {
      result[static_cast<std::size_t>(dim)] = pybind11::int_(coords[dim]);
    }
    return result.release();
  }
};

}  // namespace pybind11::detail
