// The kernels of layers: convolutions, poolings, norms.
#include <optional>
#include <utility>
#include <vector>

#include "device_case.hpp"
#include "on_device.hpp"
#include "ops/conv/kernels.hpp"
#include "ops/conv/mma_choice.hpp"
#include "ops/norm/kernels.hpp"
#include "ops/pool/kernels.hpp"

namespace pydist {

using namespace testing;
using ops::ConvOp;

void convolution(Random& random) {
  for (const DType dtype : kFloating) {
    for (const index_t groups : {1, 2}) {
      Array in(random, dtype, {2, 4 * groups, 2, 9, 11}), out(random, dtype, {2, 6, 3, 9, 11});
      Array weight(random, dtype, {6, 4, 3, 3, 3});
      const ops::ConvAttributes attributes{{-1, 0, 0}, {0, 0, 0}, {1, 1, 1},
                                           {1, 1, 1},  {1, 1, 1}, groups};
      const auto on_host = ops::conv_problem(in.host(), weight.host(), out.host(), attributes);
      const auto on_device =
          ops::conv_problem(in.device(), weight.device(), out.device(), attributes);
      const double tolerance = 4 * tolerance_of(dtype);
      cpu::boundary_conv_forward(on_host);
      cuda::boundary_conv_forward(on_device, std::nullopt, queue);
      expect("boundary_conv_forward", out, tolerance);
      cpu::boundary_conv_dgrad(on_host);
      cuda::boundary_conv_dgrad(on_device, std::nullopt, queue);
      expect("boundary_conv_dgrad", in, tolerance);
      cpu::boundary_conv_wgrad(on_host);
      cuda::boundary_conv_wgrad(on_device, std::nullopt, queue);
      expect("boundary_conv_wgrad", weight, tolerance);
    }
  }
}

namespace {

struct Layer {
  index_t groups, in_channels, out_channels;  // channels per group
  bool channels_last;
  index_t height = 20, width = 18;
};

// How often blocks of a cluster share a sum, and several clusters.
struct Shared {
  int by_blocks = 0, by_clusters = 0;
};

// Tests one operation with values that are exact in the products' format; for three products,
// with values that are not exact in one tf32.
template <ConvOp kOp>
void on_tensor_cores(Random& random, DType dtype, ops::ConvMath math, const Layer& layer,
                     Shared& shared) {
  const double scale = math == ops::ConvMath::kTf32x3 ? 1.0 / 3 : 1;
  const auto array = [&](const Coords& shape) {
    return Array(random, dtype, shape, strides_of(shape, layer.channels_last), scale);
  };
  const Array in = array({2, layer.groups * layer.in_channels, 1, layer.height, layer.width});
  const Array weight = array({layer.groups * layer.out_channels, layer.in_channels, 3, 3, 3});
  const Array out = array({2, layer.groups * layer.out_channels, 2, layer.height, layer.width});
  const ops::ConvAttributes attributes{{-1, 0, 0}, {0, 0, 0}, {1, 1, 1},
                                       {1, 1, 1},  {1, 1, 1}, layer.groups};
  const auto on_host = ops::conv_problem(in.host(), weight.host(), out.host(), attributes);
  const auto on_device = ops::conv_problem(in.device(), weight.device(), out.device(), attributes);
  index_t floats = 0;
  ops::with_mma_body<kOp>(on_device, math, [&]<class Body>(std::type_identity<Body>) {
    const Body body = Body::make(on_device, nullptr);
    floats = body.partial_elements();
    shared.by_blocks += body.cluster() > 1;
    shared.by_clusters += floats > 0;
  });
  const Array partial(random, DType::kFloat32, {floats + 1}, Coords{1});
  const ops::MmaCall call{math, static_cast<float*>(partial.device().data)};
  const double tolerance = 4 * tolerance_of(dtype);  // tensor cores truncate in sums
  if constexpr (kOp == ConvOp::kForward) {
    cpu::boundary_conv_forward(on_host);
    cuda::boundary_conv_forward(on_device, call, queue);
    expect("boundary_conv_forward on tensor cores", out, tolerance);
  } else if constexpr (kOp == ConvOp::kDgrad) {
    cpu::boundary_conv_dgrad(on_host);
    cuda::boundary_conv_dgrad(on_device, call, queue);
    expect("boundary_conv_dgrad on tensor cores", in, tolerance);
  } else {
    cpu::boundary_conv_wgrad(on_host);
    cuda::boundary_conv_wgrad(on_device, call, queue);
    expect("boundary_conv_wgrad on tensor cores", weight, tolerance);
  }
}

}  // namespace

void tensor_cores(Random& random) {
  using ops::ConvMath;
  Shared shared;
  for (const auto& [dtype, math] :
       {std::pair{DType::kFloat32, ConvMath::kTf32}, std::pair{DType::kFloat32, ConvMath::kTf32x3},
        std::pair{DType::kFloat16, ConvMath::kTf32},
        std::pair{DType::kBFloat16, ConvMath::kTf32}}) {
    for (const bool last : {false, true}) {
      for (const Layer& layer : {Layer{1, 64, 40, last}, Layer{1, 3, 6, last},
                                 Layer{2, 4, 16, last}, Layer{1, 4, 12, last, 64, 60}}) {
        on_tensor_cores<ConvOp::kForward>(random, dtype, math, layer, shared);
        on_tensor_cores<ConvOp::kDgrad>(random, dtype, math, layer, shared);
        on_tensor_cores<ConvOp::kWgrad>(random, dtype, math, layer, shared);
      }
    }
  }
  (shared.by_blocks > 0 && shared.by_clusters > 0 ? passed : failed) += 1;
}

namespace {

struct Pooling {
  std::vector<Footprint> windows;
  double slope;  // of the ReLU before it
  bool accumulate;
  index_t channels = 5;
  bool channels_last = false;  // else in any order

  Coords strides(Random& random, const Coords& shape) const {
    return channels_last ? strides_of(shape, true) : random.strides_for(shape);
  }
};

void sums(Random& random, DType dtype, const Pooling& pooling) {
  const Coords shape{2, pooling.channels, 9, 8, 21}, outputs{2, pooling.channels, 5, 4, 11};
  const Array in(random, dtype, shape, pooling.strides(random, shape));
  const Array out(random, dtype, outputs, pooling.strides(random, outputs));
  const Array gate(random, dtype, shape, in.host().strides);
  const Array depth(random, DType::kFloat64, {5}), height(random, DType::kFloat64, {4}),
      width(random, DType::kFloat64, {11});
  const ops::PoolAttributes attributes{{0, 0, 0}, {0, 0, 0}, pooling.windows};
  const auto problem = [&](bool host, bool gated) {
    const auto view = [host](const Array& array) { return host ? array.host() : array.device(); };
    const auto scale = [&](const Array& array) {
      return static_cast<const double*>(view(array).data);
    };
    ops::PoolProblem made =
        ops::pool_problem(view(in), view(out), attributes,
                          {scale(depth), scale(height), scale(width)}, pooling.accumulate);
    made.slope = pooling.slope;
    if (gated && pooling.slope != 1) made.gate = view(gate).data;
    return made;
  };
  const double tolerance = 4 * tolerance_of(dtype);
  cpu::pool_sum_forward(problem(true, false));
  cuda::pool_sum_forward(problem(false, false), queue);
  expect("pool_sum_forward", out, tolerance);
  cpu::pool_sum_backward(problem(true, true));
  cuda::pool_sum_backward(problem(false, true), queue);
  expect("pool_sum_backward", in, tolerance);
}

void maxima(Random& random, DType dtype, DType tap_dtype, const Pooling& pooling) {
  const Coords shape{2, pooling.channels, 9, 8, 21}, outputs{2, pooling.channels, 5, 4, 11};
  const Array in(random, dtype, shape, pooling.strides(random, shape));
  const Array out(random, dtype, outputs, pooling.strides(random, outputs));
  const Array taps(random, tap_dtype, outputs, pooling.strides(random, outputs));
  const ops::PoolAttributes attributes{{0, 0, 0}, {0, 0, 0}, pooling.windows};
  const auto problem = [&](bool host, bool accumulate) {
    const auto view = [host](const Array& array) { return host ? array.host() : array.device(); };
    return ops::max_problem(view(in), view(out), view(taps), attributes, accumulate);
  };
  for (const bool accumulate : {false, true}) {
    cpu::pool_max_forward(problem(true, accumulate));
    cuda::pool_max_forward(problem(false, accumulate), queue);
    expect("pool_max_forward", out, 0);
    expect("pool_max_forward's taps", taps, 0);
    cpu::pool_max_pick(problem(true, accumulate));
    cuda::pool_max_pick(problem(false, accumulate), queue);
    expect("pool_max_pick", out, 0);
  }
  cpu::pool_max_backward(problem(true, false));
  cuda::pool_max_backward(problem(false, false), queue);
  expect("pool_max_backward", in, 4 * tolerance_of(dtype));
}

}  // namespace

void pooling(Random& random) {
  const std::vector<Footprint> windows(3, Footprint(3, 2, 1, 1, 1));
  const std::vector<Footprint> adaptive{Footprint::adaptive(9, 5), Footprint::adaptive(8, 4),
                                        Footprint::adaptive(21, 11)};
  const std::vector<Footprint> disjoint(3, Footprint(2, 2, 1, 0, 0));
  for (const DType dtype : kFloating) {
    // Vectors of channels, where the memory is aligned: Array begins at random.
    for (int repeat = 0; repeat < 4; ++repeat) {
      for (const auto& footprints : {windows, disjoint}) {
        sums(random, dtype, {footprints, 0.25, repeat % 2 == 1, 24, true});
        for (const DType taps : {DType::kUInt8, DType::kInt32}) {
          maxima(random, dtype, taps, {footprints, 1, false, 24, true});
        }
      }
    }
    for (const double slope : {1.0, 0.0, 0.25}) {
      sums(random, dtype, {windows, slope, false});
      sums(random, dtype, {windows, slope, true});
      sums(random, dtype, {adaptive, slope, false});
    }
    for (const DType taps : {DType::kUInt8, DType::kInt32}) {
      maxima(random, dtype, taps, {windows, 1, false});
      maxima(random, dtype, taps, {disjoint, 1, false});
      maxima(random, dtype, taps, {adaptive, 1, false});
    }
  }
}

namespace {

struct Norm {
  DType dtype;
  ops::NormShape shape;
  double slope;
  bool learned;
};

void norm(Random& random, const Norm& given) {
  const auto& [dtype, shape, slope, learned] = given;
  constexpr index_t kParts = 3;
  const DType sum_dtype = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const Coords elements{shape.elements()}, one{1};
  const Array x(random, dtype, elements, one), grad(random, dtype, elements, one),
      out(random, dtype, elements, one);
  const Array values(random, sum_dtype, {4 * shape.rows()}, one),
      coefficients(random, sum_dtype, {3 * shape.rows()}, one),
      sums(random, DType::kFloat64, {3 * kParts * shape.rows()}, one);
  const auto problem = [&](bool host, bool has_slopes) {
    const auto at = [host](const Array& array) {
      return (host ? array.host() : array.device()).data;
    };
    return ops::NormProblem{
        dtype,    shape,   slope,      has_slopes,       at(x),
        at(grad), at(out), at(values), at(coefficients), static_cast<double*>(at(sums)),
        kParts};
  };
  const double of_sums = 4 * tolerance_of(sum_dtype), of_elements = 4 * tolerance_of(dtype);
  cpu::norm_moments(problem(true, false));  // statistics ignore the activation
  cuda::norm_moments(problem(false, false), queue);
  expect("norm_moments", sums, of_sums);
  cpu::norm_apply(problem(true, learned));
  cuda::norm_apply(problem(false, learned), queue);
  expect("norm_apply", out, of_elements);
  cpu::norm_grad_sums(problem(true, learned));
  cuda::norm_grad_sums(problem(false, learned), queue);
  expect("norm_grad_sums", sums, of_sums);
  cpu::norm_grad_input(problem(true, learned));
  cuda::norm_grad_input(problem(false, learned), queue);
  expect("norm_grad_input", out, of_elements);
}

// The computations per row, with all arrays on one side.
void norm_rows(Random& random, DType dtype, index_t members) {
  constexpr index_t kChannels = 12, kRows = 2 * kChannels;
  const index_t groups = kRows / members;
  const Coords one{1};
  const Array moments(random, DType::kFloat64, {3 * groups}, one),
      sums(random, DType::kFloat64, {2 * kRows}, one),
      totals(random, DType::kFloat64, {2 * groups}, one),
      affine(random, DType::kFloat64, {2 * kChannels}, one),
      merged(random, DType::kFloat64, {3 * groups}, one);
  const Array scale(random, dtype, {kChannels}, one), shift(random, dtype, {kChannels}, one),
      slopes(random, dtype, {kChannels}, one), values(random, dtype, {4 * kRows}, one),
      coefficients(random, dtype, {3 * kRows}, one);
  const auto norm = [&](bool host) {
    const auto at = [host](const Array& array) {
      return (host ? array.host() : array.device()).data;
    };
    const auto doubles = [&](const Array& array) { return static_cast<double*>(at(array)); };
    // The variance of random moments may be negative: eps makes it positive.
    return ops::NormRows{dtype == DType::kFloat64,
                         true,
                         groups,
                         members,
                         kChannels,
                         8.0,
                         doubles(moments),
                         at(scale),
                         at(shift),
                         at(slopes),
                         at(values),
                         doubles(sums),
                         doubles(totals),
                         doubles(affine),
                         at(coefficients)};
  };
  const double tolerance = 8 * tolerance_of(dtype), exact = 8 * tolerance_of(DType::kFloat64);
  cpu::norm_values(norm(true));
  cuda::norm_values(norm(false), queue);
  cpu::norm_slopes(norm(true));
  cuda::norm_slopes(norm(false), queue);
  expect("norm_values", values, tolerance);
  cpu::norm_totals(norm(true));
  cuda::norm_totals(norm(false), queue);
  expect("norm_totals", totals, tolerance);
  expect("norm_totals' gradients", affine, tolerance);
  cpu::norm_coefficients(norm(true));
  cuda::norm_coefficients(norm(false), queue);
  expect("norm_coefficients", coefficients, tolerance);
  const Array counts(random, DType::kFloat64, {2}, one);
  auto* const host_counts = static_cast<double*>(counts.host().data);
  host_counts[0] = 7;
  host_counts[1] = 12;
  check(cudaMemcpy(counts.device().data, host_counts, 16, cudaMemcpyHostToDevice));
  check(cudaDeviceSynchronize());
  const auto parts = [&](bool host) {
    const auto doubles = [host](const Array& array) {
      return static_cast<double*>((host ? array.host() : array.device()).data);
    };
    return ops::NormParts{2,      groups,      doubles(counts), doubles(sums),  doubles(sums),
                          {1, 0}, {groups, 1}, {groups, 1},     doubles(merged)};
  };
  cpu::norm_merge_parts(parts(true));
  cuda::norm_merge_parts(parts(false), queue);
  expect("norm_merge_parts", merged, exact);
}

}  // namespace

void norms(Random& random) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (const index_t members : {1, 4}) norm_rows(random, dtype, members);
  }
  for (const DType dtype : kFloating) {
    for (const bool channels_last : {false, true}) {
      for (const auto& [channels, per_sample] : {std::pair{5, true}, std::pair{40, false}}) {
        const ops::NormShape shape{2, channels, 297, channels_last, per_sample};
        for (const double slope : {1.0, 0.0, 0.25}) norm(random, {dtype, shape, slope, false});
        norm(random, {dtype, shape, 1, true});
      }
    }
  }
}

}  // namespace pydist
