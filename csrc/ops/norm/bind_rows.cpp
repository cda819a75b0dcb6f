// The computations per row of norms between their passes over the elements, for Python.
//
// The arrays are small and many; `Rows` borrows and checks them one by one, whatever the kernel.
#include <optional>
#include <string>

#include "bindings/bindings.hpp"
#include "bindings/on_device.hpp"
#include "ops/norm/kernels.hpp"
#include "ops/norm/rows_body.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;
using ops::NormParts;
using ops::NormRows;

void require_doubles(const char* name, const TensorView& view, index_t lines, index_t columns) {
  PYDIST_EXPECT(view.dtype == DType::kFloat64 && view.ndim() == 2 && view.shape[0] == lines &&
                    view.shape[1] == columns,
                describe(name, view) + "; it must be float64 (" + std::to_string(lines) + ", " +
                    std::to_string(columns) + ")");
  require_contiguous(name, view);
}

// Builds the arguments of a kernel, and keeps the borrowed arrays until the kernel has been called.
class Rows {
 public:
  // `values`: [3 or 4, rows], float32 or float64.
  Rows(py::handle values, Access access) : values_(borrow(values, "values", access)) {
    const TensorView& view = values_.view();
    PYDIST_EXPECT(view.ndim() == 2 && (view.shape[0] == 3 || view.shape[0] == 4) &&
                      (view.dtype == DType::kFloat32 || view.dtype == DType::kFloat64),
                  describe("values", view) + "; it must be float32 or float64 (3 or 4, rows)");
    require_contiguous("values", view);
    norm_.wide = view.dtype == DType::kFloat64;
    norm_.values = view.data;
    norm_.statistics = norm_.channels = view.shape[1];
    norm_.members = 1;
  }

  // `moments`: [3, statistics]; count, mean and sum of squared deviations of each. Several adjacent
  // rows may share one (group norm), so the rows are a multiple of the statistics.
  void set_moments(py::handle moments, double eps, bool centered) {
    const Borrowed& given = moments_.emplace(borrow(moments, "moments"));
    PYDIST_EXPECT(given->ndim() == 2,
                  describe("moments", given.view()) + "; it must be (3, groups)");
    const index_t groups = given->shape[1], rows = values_->shape[1];
    require_doubles("moments", given.view(), 3, groups);
    require_same_device("moments", given.view(), "values", values_.view());
    PYDIST_EXPECT(groups > 0 ? rows % groups == 0 : rows == 0,
                  describe("moments", given.view()) + ", " + describe("values", values_.view()) +
                      ": the rows must be a multiple of the moments");
    norm_.moments = static_cast<const double*>(given->data);
    norm_.statistics = groups;
    norm_.members = groups > 0 ? rows / groups : 1;
    norm_.eps = eps;
    norm_.centered = centered;
  }

  // One number per channel in the type of the values, or nothing; `held` keeps the array borrowed.
  const void* of_channels(const char* name, py::handle numbers, std::optional<Borrowed>& held) {
    if (numbers.is_none()) return nullptr;
    const Borrowed& given = held.emplace(borrow(numbers, name));
    PYDIST_EXPECT(given->ndim() == 1, describe(name, given.view()) + "; it must be (channels)");
    require_contiguous(name, given.view());
    require_same_dtype(name, given.view(), "values", values_.view());
    require_same_device(name, given.view(), "values", values_.view());
    set_channels(name, given.view(), given->shape[0]);
    return given->data;
  }

  void set_scale(py::handle scale) { norm_.scale = of_channels("scale", scale, scale_); }
  void set_shift(py::handle shift) { norm_.shift = of_channels("shift", shift, shift_); }
  void set_slopes(py::handle slopes) { norm_.slopes = of_channels("slopes", slopes, slopes_); }

  // A float64 array [lines, columns], which `held` keeps borrowed.
  double* doubles(const char* name, py::handle array, std::optional<Borrowed>& held, index_t lines,
                  index_t columns, Access access) {
    const Borrowed& given = held.emplace(borrow(array, name, access));
    require_doubles(name, given.view(), lines, columns);
    require_same_device(name, given.view(), "values", values_.view());
    return static_cast<double*>(given->data);
  }

  void set_sums(py::handle sums) {
    norm_.sums = doubles("sums", sums, sums_, 2, norm_.rows(), Access::kRead);
  }
  void set_totals(py::handle totals, Access access) {
    norm_.totals = doubles("totals", totals, totals_, 2, norm_.statistics, access);
  }
  void set_affine(py::handle affine) {
    if (affine.is_none()) return;
    const Borrowed& given = affine_.emplace(borrow(affine, "affine", Access::kWrite));
    PYDIST_EXPECT(given->ndim() == 2,
                  describe("affine", given.view()) + "; it must be (2, channels)");
    require_doubles("affine", given.view(), 2, given->shape[1]);
    require_same_device("affine", given.view(), "values", values_.view());
    set_channels("affine", given.view(), given->shape[1]);
    norm_.affine = static_cast<double*>(given->data);
  }
  void set_coefficients(py::handle coefficients) {
    const Borrowed& given =
        coefficients_.emplace(borrow(coefficients, "coefficients", Access::kWrite));
    require_same_dtype("coefficients", given.view(), "values", values_.view());
    require_same_device("coefficients", given.view(), "values", values_.view());
    require_contiguous("coefficients", given.view());
    PYDIST_EXPECT(given->ndim() == 2 && given->shape[0] == 3 && given->shape[1] == norm_.rows(),
                  describe("coefficients", given.view()) + "; it must be (3, rows)");
    norm_.coefficients = given->data;
  }

  const NormRows& norm() const { return norm_; }
  const Borrowed& values() const { return values_; }

 private:
  void set_channels(const char* name, const TensorView& view, index_t channels) {
    PYDIST_EXPECT(channels > 0 ? norm_.rows() % channels == 0 : norm_.rows() == 0,
                  describe(name, view) + ", " + describe("values", values_.view()) +
                      ": the rows must be a multiple of the channels");
    PYDIST_EXPECT(
        !channels_known_ || channels == norm_.channels,
        describe(name, view) + "; there are " + std::to_string(norm_.channels) + " channels");
    if (channels > 0) norm_.channels = channels;
    channels_known_ = true;
  }

  Borrowed values_;
  std::optional<Borrowed> moments_, scale_, shift_, slopes_, sums_, totals_, affine_, coefficients_;
  NormRows norm_{};
  bool channels_known_ = false;
};

void merge_parts(py::handle n, py::handle mean, py::handle m2, py::handle out) {
  const Borrowed numbers = borrow(n, "n"), means = borrow(mean, "mean"), squares = borrow(m2, "m2"),
                 found = borrow(out, "out", Access::kWrite);
  NormParts parts{};
  PYDIST_EXPECT(means->ndim() == 2,
                describe("mean", means.view()) + "; it must be (parts, groups)");
  parts.parts = means->shape[0];
  parts.statistics = means->shape[1];
  const auto given = [&](const char* name, const Borrowed& array, index_t(&strides)[2]) {
    const bool is_one = array->ndim() == 2 && array->shape[1] == 1;
    PYDIST_EXPECT(array->dtype == DType::kFloat64 && array->ndim() == 2 &&
                      array->shape[0] == parts.parts && (is_one || array->shape == means->shape),
                  describe(name, array.view()) + ", " + describe("mean", means.view()) +
                      ": they must be float64 (parts, groups), or n (parts, 1)");
    require_same_device(name, array.view(), "out", found.view());
    strides[0] = array->strides[0];
    strides[1] = is_one ? 0 : array->strides[1];
    return static_cast<const double*>(array->data);
  };
  parts.n = given("n", numbers, parts.n_strides);
  parts.mean = given("mean", means, parts.mean_strides);
  parts.m2 = given("m2", squares, parts.m2_strides);
  require_doubles("out", found.view(), 3, parts.statistics);
  parts.out = static_cast<double*>(found->data);
  on_device(
      found, [&] { cpu::norm_merge_parts(parts); }, PYDIST_ON_CUDA(norm_merge_parts(parts, queue)));
}

void values(py::handle moments, py::handle scale, py::handle shift, double eps, bool centered,
            py::handle out) {
  Rows rows(out, Access::kWrite);
  rows.set_moments(moments, eps, centered);
  rows.set_scale(scale);
  rows.set_shift(shift);
  on_device(
      rows.values(), [&] { cpu::norm_values(rows.norm()); },
      PYDIST_ON_CUDA(norm_values(rows.norm(), queue)));
}

void totals(py::handle moments, py::handle scale, double eps, bool centered, py::handle given,
            py::handle sums, py::handle out, py::handle affine) {
  Rows rows(given, Access::kRead);
  rows.set_moments(moments, eps, centered);
  rows.set_scale(scale);
  rows.set_sums(sums);
  rows.set_totals(out, Access::kWrite);
  rows.set_affine(affine);
  on_device(
      rows.values(), [&] { cpu::norm_totals(rows.norm()); },
      PYDIST_ON_CUDA(norm_totals(rows.norm(), queue)));
}

void coefficients(py::handle moments, py::handle scale, double eps, bool centered, py::handle given,
                  py::handle totals, py::handle out) {
  Rows rows(given, Access::kRead);
  rows.set_moments(moments, eps, centered);
  rows.set_scale(scale);
  rows.set_totals(totals, Access::kRead);
  rows.set_coefficients(out);
  on_device(
      rows.values(), [&] { cpu::norm_coefficients(rows.norm()); },
      PYDIST_ON_CUDA(norm_coefficients(rows.norm(), queue)));
}

void slopes(py::handle given, py::handle out) {
  Rows rows(out, Access::kWrite);
  PYDIST_EXPECT(rows.values()->shape[0] == 4,
                describe("values", rows.values().view()) + " has no place for slopes");
  PYDIST_EXPECT(!given.is_none(), "slopes: None was given; it must be (channels)");
  rows.set_slopes(given);
  on_device(
      rows.values(), [&] { cpu::norm_slopes(rows.norm()); },
      PYDIST_ON_CUDA(norm_slopes(rows.norm(), queue)));
}

}  // namespace

void bind_norm_rows(py::module_& module) {
  module.def("norm_merge_parts", &merge_parts, "n"_a, "mean"_a, "m2"_a, "out"_a,
             "out = number of values, mean and squared deviations of the union of parts.\n\n"
             "Args:\n"
             "    n: float64 [parts, G] or [parts, 1], values in each part; may be 0.\n"
             "    mean: float64 [parts, G], their means, with any strides.\n"
             "    m2: float64 [parts, G], the sums of their squared deviations from the mean.\n"
             "    out: float64 [3, G].");
  module.def(
      "norm_values", &values, "moments"_a, "scale"_a, "shift"_a, "eps"_a, "centered"_a, "values"_a,
      "values[:3] = mean, scale / sqrt(variance + eps) and offset of norm_apply.\n\n"
      "Args:\n"
      "    moments: float64 [3, G] of norm_merge_parts. With R rows, R / G consecutive ones\n"
      "        share their moments.\n"
      "    scale: [C], of the dtype of `values`, or None. Row r is of the channel r modulo C.\n"
      "    shift: as `scale`.\n"
      "    eps: added to the variance.\n"
      "    centered: whether the mean is taken off; else the mean of squares is the variance.\n"
      "    values: [3, R] or [4, R], float32 or float64.");
  module.def("norm_totals", &totals, "moments"_a, "scale"_a, "eps"_a, "centered"_a, "values"_a,
             "sums"_a, "totals"_a, "affine"_a,
             "What ranks sum up in backward, and the gradients of scale and shift.\n\n"
             "Args:\n"
             "    moments, scale, eps, centered, values: of norm_values.\n"
             "    sums: float64 [2, R] of norm_grad_sums.\n"
             "    totals: float64 [2, G], the sums over the rows of a group, times the scale.\n"
             "    affine: float64 [2, C], dL/dshift and dL/dscale; or None.");
  module.def("norm_coefficients", &coefficients, "moments"_a, "scale"_a, "eps"_a, "centered"_a,
             "values"_a, "totals"_a, "coefficients"_a,
             "The coefficients [3, R] of norm_grad_input, from the totals of all ranks.");
  module.def("norm_slopes", &slopes, "slopes"_a, "values"_a,
             "values[3] = the slopes of the rows' channels: [C], or [1] for all of them.");
}

}  // namespace pydist::bindings
