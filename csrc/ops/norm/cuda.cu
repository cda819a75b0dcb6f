// Norms on CUDA devices: the choice of the body for a problem, and its launches.
//
// norm_moments and norm_grad_sums are two launches each (parts, then their merge), all others one.
//
// Threads: sums in blocks of 256 that share memory (NormSumsBody, NormMergeBody); writing passes a
//   warp per piece of a channel (NormWriteBody); numbers of rows a lane per entry (EntryBody).
// Traffic of a norm forward and backward, in passes over an activation: x is read by norm_moments
//   and norm_apply, which writes the result; x and dL/dy are read by norm_grad_sums and again by
//   norm_grad_input, which writes dL/dx. Parts and rows are a few kilobytes.
// Proof: tests/native/test_norm.cpp and test_norm_rows.cpp by emulation, tests/gpu/test_norm_gpu.py
//   on a device.
#include "launch/cuda.cuh"
#include "launch/runtime.cuh"
#include "ops/common/dispatch.hpp"
#include "ops/norm/kernels.hpp"
#include "ops/norm/rows_body.hpp"
#include "ops/norm/sums_body.hpp"
#include "ops/norm/write_body.hpp"

namespace pydist::cuda {
namespace {

using ops::Activation;
using ops::NormProblem;

// Calls f with the types of the elements and of the activation.
template <class F>
void dispatch(const NormProblem& problem, const F& f) {
  ops::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage> type) {
    ops::dispatch_activation(problem, [&](auto activation) { f(type, activation); });
  });
}

// The second launch of sums: all parts into part 0. The device is current already.
template <bool kMoments>
void merge(const NormProblem& problem, const Queue& queue, const char* what) {
  const ops::NormMergeBody<kMoments> body{{}, problem};
  check(launch::run_tiles_on_cuda(body, stream_of(queue)), what);
}

// apply and grad_input: each has an instance per storage type, activation, layout and vector.
template <bool kForward>
void write(const NormProblem& problem, const Queue& queue, const char* what) {
  const DeviceGuard guard(queue.device);
  dispatch(
      problem, [&]<class Storage, Activation kActivation>(
                   std::type_identity<Storage>, std::integral_constant<Activation, kActivation>) {
        ops::with_norm_write_body<kForward, kActivation, Storage>(problem, [&](const auto& body) {
          check(launch::run_on_cuda(body, body.run_length(), stream_of(queue)), what);
        });
      });
}

// One launch of a body with an entry per lane (EntryBody).
template <class Body>
void run_entries(const Body& body, const Queue& queue, const char* what) {
  if (body.entries() == 0) return;
  const DeviceGuard guard(queue.device);
  check(launch::run_on_cuda(body, Body::kRun, stream_of(queue)), what);
}

template <template <class> class Body>
void run_rows(const ops::NormRows& norm, const Queue& queue, const char* what) {
  ops::dispatch_rows(
      norm, [&]<class T>(std::type_identity<T>) { run_entries(Body<T>{{{}, norm}}, queue, what); });
}

}  // namespace

void norm_moments(const NormProblem& problem, const Queue& queue) {
  constexpr const char* kWhat = "launch of norm_moments";
  const DeviceGuard guard(queue.device);
  ops::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage>) {
    ops::with_norm_sums_body<true, Activation::kNone, Storage>(problem, [&](const auto& body) {
      check(launch::run_tiles_on_cuda(body, stream_of(queue)), kWhat);
    });
  });
  merge<true>(problem, queue, kWhat);
}

void norm_apply(const NormProblem& problem, const Queue& queue) {
  write<true>(problem, queue, "launch of norm_apply");
}

void norm_grad_sums(const NormProblem& problem, const Queue& queue) {
  constexpr const char* kWhat = "launch of norm_grad_sums";
  const DeviceGuard guard(queue.device);
  dispatch(problem,
           [&]<class Storage, Activation kActivation>(
               std::type_identity<Storage>, std::integral_constant<Activation, kActivation>) {
             ops::with_norm_sums_body<false, kActivation, Storage>(problem, [&](const auto& body) {
               check(launch::run_tiles_on_cuda(body, stream_of(queue)), kWhat);
             });
           });
  merge<false>(problem, queue, kWhat);
}

void norm_grad_input(const NormProblem& problem, const Queue& queue) {
  write<false>(problem, queue, "launch of norm_grad_input");
}

void norm_merge_parts(const ops::NormParts& parts, const Queue& queue) {
  run_entries(ops::NormMergePartsBody{{}, parts}, queue, "launch of norm_merge_parts");
}

void norm_values(const ops::NormRows& norm, const Queue& queue) {
  run_rows<ops::NormValuesBody>(norm, queue, "launch of norm_values");
}

void norm_totals(const ops::NormRows& norm, const Queue& queue) {
  run_rows<ops::NormTotalsBody>(norm, queue, "launch of norm_totals");
}

void norm_coefficients(const ops::NormRows& norm, const Queue& queue) {
  run_rows<ops::NormCoefficientsBody>(norm, queue, "launch of norm_coefficients");
}

void norm_slopes(const ops::NormRows& norm, const Queue& queue) {
  run_rows<ops::NormSlopesBody>(norm, queue, "launch of norm_slopes");
}

}  // namespace pydist::cuda
