// Makes the bodies of body.hpp from views whose dtypes are known at run time.
//
// A body is one call of `run`, on either backend: no element is visited twice, no memory is
// allocated. Instances: 2 types of inputs x 2 widths of integers for LookUp, x the stored types for
// Rescale. Index formulas, threads and traffic are in body.hpp.
// Proof: tests/native/test_input.cpp emulates the bodies, tests/kernels/test_convert.py compares
// the
//   CPU with NumPy, tests/gpu/test_input_gpu.py a device with the CPU.
#pragma once

#include <type_traits>

#include "ops/common/dispatch.hpp"
#include "ops/input/body.hpp"

namespace pydist::ops {

// Calls f(std::type_identity<float or double>).
template <class F>
void dispatch_input(DType dtype, const F& f) {
  if (dtype == DType::kFloat32) return f(std::type_identity<float>{});
  f(std::type_identity<double>{});
}

// Calls run(body) with the LookUp of checked views. Integers are read as unsigned ones of the same
// width: the table is indexed by their bits.
template <class Run>
void look_up_body(const TensorView& stored, const TensorView& table, double divisor,
                  const TensorView& out, const TensorView& found, const Run& run) {
  const ConvertGrid grid = convert_grid(stored, out);
  if (grid.elements() == 0) return;
  dispatch_input(out.dtype, [&]<class To>(std::type_identity<To>) {
    const auto with = [&]<class From>(std::type_identity<From>) {
      run(LookUp<From, To>{static_cast<const From*>(stored.data), static_cast<To*>(out.data),
                           static_cast<const To*>(table.data), table.strides[0],
                           static_cast<To>(divisor), static_cast<std::int32_t*>(found.data), grid});
    };
    if (size_of(stored.dtype) == 1) return with(std::type_identity<std::uint8_t>{});
    with(std::type_identity<std::uint16_t>{});
  });
}

// Calls run(body) with the Rescale of checked views. `maps`: a ChannelMap for each channel of the
// block.
template <class Run>
void rescale_body(const TensorView& stored, const TensorView& maps, bool log, double divisor,
                  const TensorView& out, const TensorView& found, const Run& run) {
  const ConvertGrid grid = convert_grid(stored, out);
  if (grid.elements() == 0) return;
  dispatch_input(out.dtype, [&]<class To>(std::type_identity<To>) {
    dispatch(stored.dtype, [&]<class From>(std::type_identity<From>) {
      run(Rescale<From, To>{static_cast<const From*>(stored.data), static_cast<To*>(out.data),
                            static_cast<const ChannelMap*>(maps.data), log,
                            static_cast<To>(divisor), static_cast<std::int32_t*>(found.data),
                            grid});
    });
  });
}

}  // namespace pydist::ops
