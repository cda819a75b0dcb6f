// Arrays without elements, and slabs that reach nothing: a launch of no blocks is an error.
#include <vector>

#include "device_case.hpp"
#include "on_device.hpp"
#include "ops/conv/kernels.hpp"
#include "ops/input/kernels.hpp"
#include "ops/norm/kernels.hpp"
#include "ops/pack/kernels.hpp"
#include "ops/pool/kernels.hpp"
#include "ops/random/kernels.hpp"

namespace pydist {

using namespace testing;

namespace {

void convolutions(Random& random, index_t batch, index_t depth, index_t in_lo) {
  const ops::ConvAttributes attributes{{in_lo, 0, 0}, {0, 0, 0}, {1, 1, 1},
                                       {1, 1, 1},     {1, 1, 1}, 1};
  const Array in(random, DType::kFloat32, {batch, 4, depth, 5, 6}),
      weight(random, DType::kFloat32, {6, 4, 3, 3, 3}),
      out(random, DType::kFloat32, {batch, 6, 3, 5, 6});
  const auto problem = ops::conv_problem(in.device(), weight.device(), out.device(), attributes);
  for (const cuda::MmaCall& mma :
       {cuda::MmaCall{}, cuda::MmaCall{{ops::ConvMath::kTf32, nullptr}}}) {
    cuda::boundary_conv_forward(problem, mma, queue);
    cuda::boundary_conv_dgrad(problem, mma, queue);
    cuda::boundary_conv_wgrad(problem, mma, queue);
  }
  expect("boundary_conv_forward of nothing", out, 0);
  expect("boundary_conv_dgrad of nothing", in, 0);
  expect("boundary_conv_wgrad of nothing", weight, 0);
}

void poolings(Random& random, const Coords& in_shape, const Coords& out_shape) {
  const ops::PoolAttributes attributes{
      {0, 0, 0}, {0, 0, 0}, std::vector<Footprint>(3, Footprint(3, 2, 1, 1, 1))};
  const Array in(random, DType::kFloat32, in_shape), out(random, DType::kFloat32, out_shape);
  const Array taps(random, DType::kInt32, out_shape), scale(random, DType::kFloat64, {9});
  for (const bool accumulate : {false, true}) {
    const auto sums = [&](bool host) {
      const auto view = [host](const Array& array) { return host ? array.host() : array.device(); };
      const auto* const scales = static_cast<const double*>(view(scale).data);
      return ops::pool_problem(view(in), view(out), attributes, {scales, scales, scales},
                               accumulate);
    };
    const auto maxima = [&](bool host) {
      const auto view = [host](const Array& array) { return host ? array.host() : array.device(); };
      return ops::max_problem(view(in), view(out), view(taps), attributes, accumulate);
    };
    cpu::pool_sum_forward(sums(true));
    cuda::pool_sum_forward(sums(false), queue);
    expect("pool_sum_forward of nothing", out, 0);
    cpu::pool_sum_backward(sums(true));
    cuda::pool_sum_backward(sums(false), queue);
    expect("pool_sum_backward of nothing", in, 0);
    cpu::pool_max_forward(maxima(true));
    cuda::pool_max_forward(maxima(false), queue);
    expect("pool_max_forward of nothing", out, 0);
    expect("pool_max_forward's taps of nothing", taps, 0);
    cpu::pool_max_pick(maxima(true));
    cuda::pool_max_pick(maxima(false), queue);
    expect("pool_max_pick of nothing", out, 0);
    cpu::pool_max_backward(maxima(true));
    cuda::pool_max_backward(maxima(false), queue);
    expect("pool_max_backward of nothing", in, 0);
  }
}

void norms_of(Random& random, const ops::NormShape& shape) {
  const Coords one{1};
  const Array x(random, DType::kFloat32, {shape.elements()}, one),
      values(random, DType::kFloat32, {3 * shape.rows()}, one),
      sums(random, DType::kFloat64, {2 * 2 * shape.rows()}, one);
  const auto problem = [&](bool host) {
    const auto at = [host](const Array& array) {
      return (host ? array.host() : array.device()).data;
    };
    return ops::NormProblem{.dtype = DType::kFloat32,
                            .shape = shape,
                            .slope = 0,
                            .learned = false,
                            .x = at(x),
                            .grad = at(x),
                            .out = at(x),
                            .values = at(values),
                            .coefficients = at(values),
                            .sums = static_cast<double*>(at(sums)),
                            .parts = 2};
  };
  cpu::norm_moments(problem(true));
  cuda::norm_moments(problem(false), queue);
  expect("norm_moments of nothing", sums, 0);
  cpu::norm_grad_sums(problem(true));
  cuda::norm_grad_sums(problem(false), queue);
  expect("norm_grad_sums of nothing", sums, 0);
  cuda::norm_apply(problem(false), queue);
  cuda::norm_grad_input(problem(false), queue);
  expect("norm_apply of nothing", x, 0);
}

}  // namespace

void empties(Random& random) {
  for (const std::vector<Box>& boxes :
       {std::vector<Box>{}, std::vector<Box>{Box(Coords(3), Coords(3))}}) {
    const ops::Regions regions(boxes);
    const Array view(random, DType::kFloat32, {2, 3, 4}), buffer(random, DType::kFloat32, {0});
    cuda::pack(view.device(), regions, buffer.device(), queue);
    cuda::unpack(buffer.device(), regions, view.device(), queue);
    cuda::unpack_add(buffer.device(), regions, view.device(), queue);
    expect("packing of nothing", view, 0);
  }
  convolutions(random, 0, 1, -1);
  convolutions(random, 2, 0, 0);
  convolutions(random, 2, 1, 50);
  poolings(random, {0, 3, 4, 5, 6}, {0, 3, 2, 3, 3});
  poolings(random, {2, 3, 0, 5, 6}, {2, 3, 2, 3, 3});
  poolings(random, {2, 3, 4, 5, 6}, {2, 3, 2, 3, 0});
  for (const bool last : {false, true}) {
    for (const bool per_sample : {false, true}) {
      norms_of(random, {0, 3, 7, last, per_sample});
      norms_of(random, {2, 3, 0, last, per_sample});
    }
  }
  const Array stored(random, DType::kUInt8, {2, 0, 4, 5}),
      out(random, DType::kFloat32, {2, 0, 4, 5});
  const Array table(random, DType::kFloat32, {2, 256}, {256, 1}),
      maps(random, DType::kFloat64, {2, 4}, {4, 1}), found(random, DType::kInt32, {1});
  cuda::look_up(stored.device(), table.device(), 1, out.device(), found.device(), queue);
  cuda::rescale(stored.device(), maps.device(), true, 1, out.device(), found.device(), queue);
  cuda::keyed_uniform(out.device(), {.value = 7}, {0, 0, 0, 0}, {2, 3, 4, 5}, queue);
  expect("conversion of nothing", found, 0);
}

}  // namespace pydist
