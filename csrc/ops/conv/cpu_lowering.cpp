// The lowering of cpu_lowering.hpp: first along single dims (lines, links), then planes and their
// jobs, last the copy into the workspace. Cheap: it is as large as the kernel times the thin
// extent.
#include "ops/conv/cpu_lowering.hpp"

#include <algorithm>
#include <limits>

#include "ops/common/half.hpp"

namespace pydist::cpu {
namespace {

using ops::ConvDim;
using ops::ConvProblem;

// A plane dim of forward. Destinations are outputs: kernel index k reaches the outputs o for which
// 0 <= o * stride + k * dilation + base < in_extent. All reached outputs are one class; the taps of
// equal (k * dilation) % stride read the same phase of the source.
Line lower_forward(const ConvDim& dim) {
  struct TapReach {
    index_t kernel, lo, hi;
  };
  std::vector<TapReach> reaches;
  index_t lo = dim.out_extent, hi = 0;
  for (index_t k = 0; k < dim.kernel; ++k) {
    const index_t shift = k * dim.dilation + dim.base;
    const TapReach reach{k, std::max<index_t>(0, ceil_div(-shift, dim.stride)),
                         std::min(dim.out_extent, ceil_div(dim.in_extent - shift, dim.stride))};
    if (reach.lo >= reach.hi) continue;
    reaches.push_back(reach);
    lo = std::min(lo, reach.lo);
    hi = std::max(hi, reach.hi);
  }
  Line line;
  if (reaches.empty()) return line;
  line.source_step = dim.stride;
  LineClass all{lo, 1, hi - lo, {}};
  std::vector<index_t> remainders;
  for (const TapReach& reach : reaches) {
    const index_t step = reach.kernel * dim.dilation;
    const index_t remainder = step % dim.stride;
    auto phase = std::ranges::find(remainders, remainder);
    if (phase == remainders.end()) {
      phase = remainders.insert(phase, remainder);
      line.phase_first.push_back(lo * dim.stride + dim.base + remainder);
    }
    all.taps.push_back({reach.kernel, phase - remainders.begin(), step / dim.stride});
    line.extent = std::max(line.extent, all.count + step / dim.stride);
  }
  line.classes.push_back(std::move(all));
  return line;
}

// A plane dim of dgrad. Destinations are inputs; inputs of equal residue modulo the stride, i =
// residue + stride * t, have the same taps: kernel index k reads the output t - (k * dilation +
// base - residue) / stride where that division is exact. So there are at most `stride` classes.
Line lower_dgrad(const ConvDim& dim) {
  Line line;
  index_t first_source = std::numeric_limits<index_t>::max();
  for (index_t residue = 0; residue < std::min(dim.stride, dim.in_extent); ++residue) {
    const index_t members = ceil_div(dim.in_extent - residue, dim.stride);
    LineClass same{residue, dim.stride, 0, {}};
    index_t lo = members, hi = 0;
    for (index_t k = 0; k < dim.kernel; ++k) {
      const index_t shift = k * dim.dilation + dim.base - residue;
      if (floor_div(shift, dim.stride) * dim.stride != shift) continue;
      const index_t lag = shift / dim.stride;
      const index_t tap_lo = std::max<index_t>(0, lag);
      const index_t tap_hi = std::min(members, dim.out_extent + lag);
      if (tap_lo >= tap_hi) continue;
      lo = std::min(lo, tap_lo);
      hi = std::max(hi, tap_hi);
      same.taps.push_back({k, 0, -lag});
    }
    if (same.taps.empty()) continue;
    same.first = residue + lo * dim.stride;
    same.count = hi - lo;
    for (LineTap& tap : same.taps) {
      tap.offset += lo;  // the source that the class's first member reads
      first_source = std::min(first_source, tap.offset);
    }
    line.classes.push_back(std::move(same));
  }
  if (line.classes.empty()) return line;
  line.phase_first = {first_source};
  for (LineClass& same : line.classes) {
    for (LineTap& tap : same.taps) {
      tap.offset -= first_source;
      line.extent = std::max(line.extent, tap.offset + same.count);
    }
  }
  return line;
}

// The thin dim: pairs of a kernel index and a source for each destination, found from the few
// sources, whatever the destination's extent. Sums go by rising kernel index.
std::vector<ThinLink> link_thin(const ConvDim& dim, ConvRole role) {
  struct Triple {
    index_t destination, kernel, source;
  };
  std::vector<Triple> triples;
  const bool forward = role == ConvRole::kForward;
  for (index_t source = 0; source < (forward ? dim.in_extent : dim.out_extent); ++source) {
    for (index_t k = 0; k < dim.kernel; ++k) {
      const index_t shift = k * dim.dilation + dim.base;
      index_t destination = source * dim.stride + shift;
      if (forward) {
        destination = floor_div(source - shift, dim.stride);
        if (destination * dim.stride + shift != source) continue;
      }
      if (destination < 0 || destination >= (forward ? dim.out_extent : dim.in_extent)) continue;
      triples.push_back({destination, k, source});
    }
  }
  std::ranges::sort(triples, [](const Triple& a, const Triple& b) {
    return std::pair(a.destination, a.kernel) < std::pair(b.destination, b.kernel);
  });
  std::vector<ThinLink> links;
  for (const Triple& triple : triples) {
    if (links.empty() || links.back().destination != triple.destination) {
      links.push_back({triple.destination, {}});
    }
    links.back().pairs.emplace_back(triple.kernel, triple.source);
  }
  return links;
}

// One plane of destinations: all combinations of the taps of its three dims, as offsets.
PlaneJob plane_job(const ConvLowering& lowering, const ThinLink& link, const LineClass& rows,
                   const LineClass& columns, const index_t* strides, const index_t* weight) {
  PlaneJob job;
  job.destination = link.destination * strides[lowering.thin] + rows.first * strides[lowering.row] +
                    columns.first * strides[lowering.column];
  job.row_stride = rows.step * strides[lowering.row];
  job.stride = columns.step * strides[lowering.column];
  job.rows = rows.count;
  job.columns = columns.count;
  const auto row_phases = static_cast<index_t>(lowering.rows.phase_first.size());
  const auto column_phases = static_cast<index_t>(lowering.columns.phase_first.size());
  for (const auto& [kernel, source] : link.pairs) {
    for (const LineTap& row : rows.taps) {
      for (const LineTap& column : columns.taps) {
        const index_t plane = (source * row_phases + row.phase) * column_phases + column.phase;
        job.source_offset.push_back(plane * lowering.plane + row.offset * lowering.pitch +
                                    column.offset);
        job.weight_offset.push_back(kernel * weight[lowering.thin] +
                                    row.kernel * weight[lowering.row] +
                                    column.kernel * weight[lowering.column]);
      }
    }
  }
  return job;
}

}  // namespace

// The thin dim is the shortest of the source.
ConvLowering lower(const ConvProblem& problem, ConvRole role) {
  const bool forward = role == ConvRole::kForward;
  const auto source_extent = [&](int dim) {
    return forward ? problem.dims[dim].in_extent : problem.dims[dim].out_extent;
  };
  ConvLowering lowering{};
  for (int dim = 1; dim < ops::kSpatialDims; ++dim) {
    if (source_extent(dim) < source_extent(lowering.thin)) lowering.thin = dim;
  }
  lowering.row = lowering.thin == 0 ? 1 : 0;
  lowering.column = lowering.thin == 2 ? 1 : 2;
  const auto line = [&](int dim) {
    return forward ? lower_forward(problem.dims[dim]) : lower_dgrad(problem.dims[dim]);
  };
  lowering.rows = line(lowering.row);
  lowering.columns = line(lowering.column);
  lowering.links = link_thin(problem.dims[lowering.thin], role);
  lowering.thin_extent = source_extent(lowering.thin);
  lowering.pitch = lowering.columns.extent;
  lowering.plane = lowering.rows.extent * lowering.pitch;
  lowering.channel =
      lowering.thin_extent *
      static_cast<index_t>(lowering.rows.phase_first.size() * lowering.columns.phase_first.size()) *
      lowering.plane;
  const index_t* const strides = (forward ? problem.out : problem.in).strides + 2;
  for (const ThinLink& link : lowering.links) {
    for (const LineClass& rows : lowering.rows.classes) {
      for (const LineClass& columns : lowering.columns.classes) {
        lowering.jobs.push_back(
            plane_job(lowering, link, rows, columns, strides, problem.weight.strides + 2));
      }
    }
  }
  return lowering;
}

namespace {

// One row of a phase: copies positions whose source index is inside the array, zeros the others.
template <class T, class Source>
void fill_row(const Line& line, index_t first, index_t source_extent, const Source* source,
              index_t stride, T* row) {
  const index_t lo = std::clamp<index_t>(ceil_div(-first, line.source_step), 0, line.extent);
  const index_t hi =
      std::clamp<index_t>(ceil_div(source_extent - first, line.source_step), lo, line.extent);
  std::fill(row, row + lo, T{});
  const Source* const values = source + first * stride;
  const index_t step = line.source_step * stride;
  if (step == 1) {
    for (index_t x = lo; x < hi; ++x) row[x] = ops::load_as(values[x]);
  } else {
    for (index_t x = lo; x < hi; ++x) row[x] = ops::load_as(values[x * step]);
  }
  std::fill(row + hi, row + line.extent, T{});
}

}  // namespace

template <class T, class Source>
void fill_channel(const ConvLowering& lowering, const ConvProblem& problem, ConvRole role,
                  const Source* channel, T* workspace) {
  const bool forward = role == ConvRole::kForward;
  const index_t* const strides = (forward ? problem.in : problem.out).strides + 2;
  const auto extent = [&](int dim) {
    return forward ? problem.dims[dim].in_extent : problem.dims[dim].out_extent;
  };
  T* row = workspace;
  for (index_t thin = 0; thin < lowering.thin_extent; ++thin) {
    for (const index_t row_first : lowering.rows.phase_first) {
      for (const index_t column_first : lowering.columns.phase_first) {
        for (index_t y = 0; y < lowering.rows.extent; ++y, row += lowering.pitch) {
          const index_t index = row_first + y * lowering.rows.source_step;
          if (index < 0 || index >= extent(lowering.row)) {
            std::fill(row, row + lowering.pitch, T{});
            continue;
          }
          fill_row(lowering.columns, column_first, extent(lowering.column),
                   channel + thin * strides[lowering.thin] + index * strides[lowering.row],
                   strides[lowering.column], row);
        }
      }
    }
  }
}

template void fill_channel(const ConvLowering&, const ConvProblem&, ConvRole, const float*, float*);
template void fill_channel(const ConvLowering&, const ConvProblem&, ConvRole, const double*,
                           double*);
template void fill_channel(const ConvLowering&, const ConvProblem&, ConvRole, const ops::Float16*,
                           float*);
template void fill_channel(const ConvLowering&, const ConvProblem&, ConvRole, const ops::BFloat16*,
                           float*);

}  // namespace pydist::cpu
