// Norms, with an activation after them, for Python.
#include <string>

#include "bindings/bindings.hpp"
#include "bindings/on_device.hpp"
#include "ops/norm/kernels.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;
using ops::NormProblem;

// Whether the array is dense in the order [N, C, ...], or [N, ..., C] if channels are last. Strides
// of dims of extent 1 do not matter.
bool is_dense(const TensorView& view, bool channels_last) {
  index_t expected = 1;
  const auto dim_ok = [&](int dim) {
    if (view.shape[dim] != 1 && view.strides[dim] != expected) return false;
    expected *= view.shape[dim];
    return true;
  };
  if (channels_last && !dim_ok(1)) return false;
  for (int dim = view.ndim() - 1; dim >= 2; --dim) {
    if (!dim_ok(dim)) return false;
  }
  return (channels_last || dim_ok(1)) && dim_ok(0);
}

// The problem of arrays of one shape and order. `rows` is the number of values per statistic.
NormProblem problem_of(const char* name, const TensorView& x, const char* rows_name,
                       const TensorView& rows) {
  PYDIST_EXPECT(x.ndim() >= 2, describe(name, x) + ": a norm needs samples and channels");
  PYDIST_EXPECT(is_floating(x.dtype),
                describe(name, x) + "; possible are float16, bfloat16, float32 and float64");
  NormProblem problem{};
  problem.dtype = x.dtype;
  problem.slope = 1;
  index_t positions = 1;
  for (int dim = 2; dim < x.ndim(); ++dim) positions *= x.shape[dim];
  const index_t count = rows.shape[rows.ndim() - 1];
  problem.shape = {x.shape[0], x.shape[1], positions, false, count != x.shape[1]};
  PYDIST_EXPECT(count == problem.shape.rows(),
                describe(name, x) + ", " + describe(rows_name, rows) +
                    ": it needs a value for each channel, or each channel of each sample");
  require_same_device(name, x, rows_name, rows);
  require_contiguous(rows_name, rows);
  if (x.elements() > 0 && !is_dense(x, false)) {
    PYDIST_EXPECT(is_dense(x, true),
                  describe(name, x) +
                      ": its memory must be dense and in the order [N, C, ...] or "
                      "[N, ..., C]");
    problem.shape.channels_last = true;
  }
  problem.x = x.data;
  return problem;
}

void check_alike(const char* name, const TensorView& view, const TensorView& x,
                 const NormProblem& problem) {
  require_same_dtype(name, view, "x", x);
  require_same_device(name, view, "x", x);
  PYDIST_EXPECT(
      view.shape == x.shape && (x.elements() == 0 || is_dense(view, problem.shape.channels_last)),
      describe(name, view) + ", " + describe("x", x) +
          ": they must have one shape and the same order in memory");
}

// `most`: the largest number of values per row; the least is 3.
const void* values_of(const char* name, const TensorView& view, const TensorView& x, index_t most) {
  const DType needed = x.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  PYDIST_EXPECT(
      view.ndim() == 2 && view.shape[0] >= 3 && view.shape[0] <= most && view.dtype == needed,
      describe(name, view) + "; it must be " + std::string(name_of(needed)) +
          (most > 3 ? " (3 or 4, rows) for " : " (3, rows) for ") + describe("x", x));
  return view.data;
}

// Sets the values and the activation: one slope for all, or learned ones as a fourth row of values.
void set_values(NormProblem& problem, const TensorView& values, const TensorView& x,
                double negative_slope) {
  problem.values = values_of("values", values, x, 4);
  problem.learned = values.shape[0] == 4;
  PYDIST_EXPECT(!problem.learned || negative_slope == 1,
                describe("values", values) + " holds slopes, and the negative slope is " +
                    std::to_string(negative_slope) + "; it must be 1 then");
  problem.slope = negative_slope;
}

// `sums`: [parts, 2 or 3, rows]; the number of parts is the caller's choice.
void set_sums(NormProblem& problem, const TensorView& sums) {
  const index_t count = problem.learned ? 3 : 2;
  PYDIST_EXPECT(
      sums.ndim() == 3 && sums.shape[0] >= 1 && sums.shape[1] == count &&
          sums.dtype == DType::kFloat64,
      describe("sums", sums) + "; it must be float64 (parts, " + std::to_string(count) + ", rows)");
  problem.sums = static_cast<double*>(sums.data);
  problem.parts = sums.shape[0];
}

void require_rows(const char* name, const TensorView& view) {
  PYDIST_EXPECT(view.ndim() >= 1, describe(name, view) + ": it must have a dim of rows");
}

void moments(py::handle x, py::handle sums) {
  const Borrowed input = borrow(x, "x"), found = borrow(sums, "sums", Access::kWrite);
  require_rows("sums", found.view());
  NormProblem problem = problem_of("x", input.view(), "sums", found.view());
  set_sums(problem, found.view());
  on_device(
      input, [&] { cpu::norm_moments(problem); }, PYDIST_ON_CUDA(norm_moments(problem, queue)));
}

void apply(py::handle x, py::handle out, py::handle values, double negative_slope) {
  const Borrowed input = borrow(x, "x"), y = borrow(out, "out", Access::kWrite),
                 given = borrow(values, "values");
  require_rows("values", given.view());
  NormProblem problem = problem_of("x", input.view(), "values", given.view());
  check_alike("out", y.view(), input.view(), problem);
  set_values(problem, given.view(), input.view(), negative_slope);
  problem.out = y->data;
  on_device(input, [&] { cpu::norm_apply(problem); }, PYDIST_ON_CUDA(norm_apply(problem, queue)));
}

void grad_sums(py::handle grad, py::handle x, py::handle values, py::handle sums,
               double negative_slope) {
  const Borrowed dy = borrow(grad, "grad"), input = borrow(x, "x"),
                 given = borrow(values, "values"), found = borrow(sums, "sums", Access::kWrite);
  require_rows("values", given.view());
  require_rows("sums", found.view());
  NormProblem problem = problem_of("x", input.view(), "values", given.view());
  check_alike("grad", dy.view(), input.view(), problem);
  problem_of("x", input.view(), "sums", found.view());
  set_values(problem, given.view(), input.view(), negative_slope);
  set_sums(problem, found.view());
  problem.grad = dy->data;
  on_device(
      input, [&] { cpu::norm_grad_sums(problem); }, PYDIST_ON_CUDA(norm_grad_sums(problem, queue)));
}

void grad_input(py::handle grad, py::handle x, py::handle out, py::handle values,
                py::handle coefficients, double negative_slope) {
  const Borrowed dy = borrow(grad, "grad"), input = borrow(x, "x"),
                 dx = borrow(out, "out", Access::kWrite), given = borrow(values, "values"),
                 more = borrow(coefficients, "coefficients");
  require_rows("values", given.view());
  require_rows("coefficients", more.view());
  NormProblem problem = problem_of("x", input.view(), "values", given.view());
  check_alike("grad", dy.view(), input.view(), problem);
  check_alike("out", dx.view(), input.view(), problem);
  problem_of("x", input.view(), "coefficients", more.view());
  set_values(problem, given.view(), input.view(), negative_slope);
  problem.coefficients = values_of("coefficients", more.view(), input.view(), 3);
  problem.grad = dy->data;
  problem.out = dx->data;
  on_device(
      input, [&] { cpu::norm_grad_input(problem); },
      PYDIST_ON_CUDA(norm_grad_input(problem, queue)));
}

}  // namespace

void bind_norm_rows(py::module_& module);  // bind_rows.cpp

void bind_norm(py::module_& module) {
  bind_norm_rows(module);
  module.def(
      "norm_moments", &moments, "x"_a, "sums"_a,
      "sums[0] = mean and sum of squared deviations of every row of `x`, which is read once.\n\n"
      "Args:\n"
      "    x: [N, C, ...], dense, in memory [N, C, ...] or [N, ..., C]; may be empty.\n"
      "    sums: float64 [parts, 2, R], where a row is a channel (R = C) or a channel of a sample\n"
      "        (R = N C). `parts` is how many pieces of the positions are summed up apart and\n"
      "        then merged: the result depends on it, but not on the threads.");
  module.def(
      "norm_apply", &apply, "x"_a, "out"_a, "values"_a, "negative_slope"_a,
      "out = act((x - mean) factor + offset), where act takes negative values times the slope.\n\n"
      "Args:\n"
      "    x: as of norm_moments.\n"
      "    out: of the shape and memory order of `x`, or `x` itself.\n"
      "    values: [3, R], mean, factor and offset; float32, or float64 for a float64 `x`. Or\n"
      "        [4, R]: the last ones are the slopes of the rows, of PReLU; the slope must be 1.\n"
      "    negative_slope: 1 for no activation, 0 for ReLU.");
  module.def(
      "norm_grad_sums", &grad_sums, "grad"_a, "x"_a, "values"_a, "sums"_a, "negative_slope"_a,
      "sums[0] = the sums of g and of g (x - mean) of every row, g = grad times act'.\n\n"
      "`grad` is dL/dout of norm_apply with the same `x`, `values` and slope; `sums` is as of\n"
      "norm_moments. With slopes of the rows it is [parts, 3, R]: last come their gradients.");
  module.def(
      "norm_grad_input", &grad_input, "grad"_a, "x"_a, "out"_a, "values"_a, "coefficients"_a,
      "negative_slope"_a,
      "out = a g + b (x - mean) + d with `coefficients` = a, b and d, and g as of norm_grad_sums.");
}

}  // namespace pydist::bindings
