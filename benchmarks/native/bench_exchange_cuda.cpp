// Messages of NCCL between two ranks, alone and beside a convolution.
//
// The ranks are two threads of this process, on two devices or on one: threads share a device at
// the same time, while processes take turns of milliseconds. A step packs both faces, exchanges
// them, convolves the shard on the main stream and unpacks what came, in three ways: "overlapped"
// (the exchange is awaited after the convolution), "awaited" (before it), and "silent" (never
// started). The time that messages cost although they overlap is overlapped minus silent.
//
// Counters, from events on the main stream and on NCCL's: "exchange_us" and "conv_us", their
// durations beside each other, and "hidden", the part of the exchange's duration within the
// convolution's.
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/communicator.hpp"
#include "on_device.hpp"
#include "ops/conv/kernels.hpp"
#include "ops/conv/mma_choice.hpp"
#include "ops/pack/kernels.hpp"

namespace pydist::bench {
namespace {

using comm::CudaDriver;
using comm::DeviceMessage;
using comm::NcclCommunicator;
using comm::NcclLibrary;
using ops::ConvMath;
using ops::Regions;

constexpr int kRanks = 2;
constexpr int kSteps = 10;  // queued together
constexpr comm::NcclLimits kLimits{60.0, 60.0};

// The two ranks, connected once.
class Group {
 public:
  static Group& instance() {
    static Group group;
    return group;
  }
  // Why there is none; empty if there is.
  const std::string& missing() const { return missing_; }
  NcclCommunicator& of(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }
  static int device_of(int rank) { return rank % cuda::device_count(); }
  // Waits for the other rank.
  void meet() { barrier_.arrive_and_wait(); }
  void close() {
    on_ranks([this](int rank) { of(rank).close(); });
    for (auto& each : ranks_) each.reset();
  }

 private:
  Group() : barrier_(kRanks), ranks_(kRanks) {
    try {
      const std::vector<std::string> names{"libnccl.so.2"};
      const auto library = std::make_shared<const NcclLibrary>(names, true);
      const auto driver = std::make_shared<const CudaDriver>("libcuda.so.1");
      const comm::NcclUniqueId id = library->unique_id();
      on_ranks([&](int rank) {
        ranks_[static_cast<std::size_t>(rank)] = std::make_unique<NcclCommunicator>(
            library, driver, id, rank, kRanks, device_of(rank), kLimits);
      });
    } catch (const std::exception& error) {
      missing_ = error.what();
    }
  }

  // Runs call(rank) for all ranks at the same time, and throws the first error.
  template <class Call>
  static void on_ranks(const Call& call) {
    std::vector<std::exception_ptr> errors(kRanks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          check(cudaSetDevice(device_of(rank)));
          call(rank);
        } catch (...) {
          errors[static_cast<std::size_t>(rank)] = std::current_exception();
        }
      });
    }
    for (std::thread& each : threads) each.join();
    for (const std::exception_ptr& each : errors) {
      if (each) std::rethrow_exception(each);
    }
  }

  std::barrier<> barrier_;
  std::vector<std::unique_ptr<NcclCommunicator>> ranks_;
  std::string missing_;
};

// RAII stream of the current device.
class OwnStream {
 public:
  OwnStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  cudaStream_t handle() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

struct Layer {
  const char* name;
  index_t in_channels, out_channels;
  Coords shard;  // spatial
};
const Layer kLayers[] = {
    {"cosmoflow1_4x16_128^3", 4, 16, {128, 128, 128}},
    {"cosmoflow2_16x32_64^3", 16, 32, {64, 64, 64}},
    {"unet_64x64_64^3", 64, 64, {64, 64, 64}},
};

enum class Way { kOverlapped, kAwaited, kSilent };
const char* const kWays[] = {"overlapped", "awaited", "silent"};

// A rank's shard in bfloat16, channels last, cut over depth, with its faces and its convolution.
class Shard {
 public:
  Shard(const Layer& layer, int rank)
      : rank_(rank),
        device_(Group::device_of(rank)),
        plane_(layer.shard[1] * layer.shard[2] * layer.in_channels),
        x_(bytes(plane_ * layer.shard[0])),
        y_(bytes(volume_of(layer.shard) * layer.out_channels)),
        weight_(bytes(27 * layer.in_channels * layer.out_channels)),
        sent_(bytes(2 * plane_)),
        received_(bytes(2 * plane_)),
        halo_(bytes(2 * plane_)) {
    std::vector<ops::BFloat16> values(static_cast<std::size_t>(plane_ * layer.shard[0]));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = ops::store_as<ops::BFloat16>(value(rank, i));
    }
    check(cudaMemcpy(x_.data(), values.data(), bytes(std::ssize(values)), cudaMemcpyHostToDevice));
    check(cudaMemset(y_.data(), 0, bytes(volume_of(layer.shard) * layer.out_channels)));
    check(cudaMemset(weight_.data(), 0, bytes(27 * layer.in_channels * layer.out_channels)));
    view_ = in_order(x_, layer.in_channels, layer.shard);
    halo_view_ = in_order(halo_, layer.in_channels, {2, layer.shard[1], layer.shard[2]});
    const TensorView in = tensor(x_, 1, layer.in_channels, layer.shard);
    const TensorView out = tensor(y_, 1, layer.out_channels, layer.shard);
    const TensorView weight = tensor(weight_, layer.out_channels, layer.in_channels, {3, 3, 3});
    const ops::ConvAttributes attributes{Coords(3), Coords(3), {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1};
    problem_ = ops::conv_problem(in, weight, out, attributes);
    index_t workspace = 0;
    ops::with_mma_body<ops::ConvOp::kForward>(
        problem_, ConvMath::kTf32, [&]<class Body>(std::type_identity<Body>) {
          workspace = Body::make(problem_, nullptr).partial_elements();
        });
    workspace_ = std::make_unique<Memory>(static_cast<std::size_t>(workspace) * sizeof(float));
    mma_ = {ConvMath::kTf32, static_cast<float*>(workspace_->data())};
    Coords hi = view_.shape;
    hi[1] = 1;
    Coords lo(5);
    const Box first(lo, hi);
    lo[1] = layer.shard[0] - 1;
    hi[1] = layer.shard[0];
    faces_ = std::make_unique<Regions>(std::vector<Box>{first, Box(lo, hi)});
    halo_faces_ = std::make_unique<Regions>(std::vector<Box>{Box(Coords(5), halo_view_.shape)});
    const auto message = [&](const Memory& memory) {
      return DeviceMessage{1 - rank, static_cast<std::byte*>(memory.data()), bytes(2 * plane_)};
    };
    sends_ = {message(sent_)};
    receives_ = {message(received_)};
  }

  void step(Way way) {
    NcclCommunicator& nccl = Group::instance().of(rank_);
    const cuda::Queue queue{device_, stream_.handle()};
    cuda::pack(view_, *faces_, buffer(sent_), queue);
    NcclCommunicator::Done done;
    if (way != Way::kSilent) {
      done = std::make_shared<comm::Event>(nccl.context());
      ready_.record(stream_.handle());
      nccl.exchange(sends_, receives_, 0, stream_.handle(), done);
    }
    if (way == Way::kAwaited) nccl.wait(done, stream_.handle());
    begun_.record(stream_.handle());
    cuda::boundary_conv_forward(problem_, mma_, queue);
    ended_.record(stream_.handle());
    if (way != Way::kSilent) {
      nccl.wait(done, stream_.handle());  // the exchange is on NCCL's stream from here on
      arrived_.record(nccl.stream());
    }
    cuda::unpack(buffer(received_), *halo_faces_, halo_view_, queue);
  }

  // Whether both halo planes are the other rank's faces.
  bool right() {
    std::vector<ops::BFloat16> found(static_cast<std::size_t>(2 * plane_));
    check(cudaMemcpyAsync(found.data(), received_.data(), bytes(2 * plane_), cudaMemcpyDeviceToHost,
                          stream_.handle()));
    check(cudaStreamSynchronize(stream_.handle()));
    const index_t last = plane_ * (view_.shape[1] - 1);
    for (index_t i = 0; i < 2 * plane_; ++i) {
      const auto at = static_cast<std::size_t>(i < plane_ ? i : last + i - plane_);
      const float wanted = ops::load_as(ops::store_as<ops::BFloat16>(value(1 - rank_, at)));
      if (ops::load_as(found[static_cast<std::size_t>(i)]) != wanted) return false;
    }
    return true;
  }

  void* stream() const { return stream_.handle(); }
  double conv_seconds() const { return ended_.since(begun_); }
  double exchange_seconds() const { return arrived_.since(ready_); }
  // Seconds of the exchange within the convolution.
  double hidden_seconds() const {
    const double begin = std::max(0.0, begun_.since(ready_));
    const double end = std::min(exchange_seconds(), ended_.since(ready_));
    return std::max(0.0, end - begin);
  }

 private:
  static std::size_t bytes(index_t elements) {
    return static_cast<std::size_t>(elements) * sizeof(ops::BFloat16);
  }
  static float value(int rank, std::size_t i) {
    return static_cast<float>((i + static_cast<std::size_t>(rank) * 101) % 251);
  }
  TensorView view_of(const Memory& memory, const Coords& shape, const Coords& strides) const {
    return {memory.data(), DType::kBFloat16, shape, strides, {DeviceType::kCuda, device_}};
  }
  // [N, C, D, H, W], with channels last in memory.
  TensorView tensor(const Memory& memory, index_t batch, index_t channels,
                    const Coords& spatial) const {
    return view_of(memory, {batch, channels, spatial[0], spatial[1], spatial[2]},
                   {channels * volume_of(spatial), 1, channels * spatial[1] * spatial[2],
                    channels * spatial[2], channels});
  }
  // [1, D, H, W, C]: dims in the order of memory, which messages have too.
  TensorView in_order(const Memory& memory, index_t channels, const Coords& spatial) const {
    return view_of(memory, {1, spatial[0], spatial[1], spatial[2], channels},
                   {channels * volume_of(spatial), channels * spatial[1] * spatial[2],
                    channels * spatial[2], channels, 1});
  }
  TensorView buffer(const Memory& memory) const { return view_of(memory, {2 * plane_}, {1}); }

  int rank_, device_;
  index_t plane_;  // elements of a face
  Memory x_, y_, weight_, sent_, received_, halo_;
  OwnStream stream_;
  TensorView view_, halo_view_;
  ops::ConvProblem problem_;
  std::unique_ptr<Memory> workspace_;
  cuda::MmaCall mma_;
  std::unique_ptr<Regions> faces_, halo_faces_;
  std::vector<DeviceMessage> sends_, receives_;
  TimedEvent ready_, begun_, ended_, arrived_;
};

// Times kSteps calls on this rank's stream, which both ranks begin together.
template <class Call>
void run_together(benchmark::State& state, void* stream, const Call& call) {
  Group& group = Group::instance();
  TimedEvent begin, end;
  for (auto _ : state) {
    group.meet();
    begin.record(stream);
    for (int step = 0; step < kSteps; ++step) call();
    end.record(stream);
    end.synchronize();
    state.SetIterationTime(end.since(begin) / kSteps);
  }
}

void bench_step(benchmark::State& state, const Layer& layer, Way way) {
  const int rank = state.thread_index();
  check(cudaSetDevice(Group::device_of(rank)));
  Shard shard(layer, rank);
  Group::instance().meet();
  shard.step(Way::kAwaited);
  if (!shard.right()) {
    // Returning would leave the other rank waiting.
    std::fprintf(stderr, "rank %d received a wrong face\n", rank);
    std::abort();
  }
  run_together(state, shard.stream(), [&] { shard.step(way); });
  if (way != Way::kSilent) {
    state.counters["exchange_us"] =
        benchmark::Counter(shard.exchange_seconds() * 1e6, benchmark::Counter::kAvgThreads);
    state.counters["hidden"] = benchmark::Counter(shard.hidden_seconds() / shard.exchange_seconds(),
                                                  benchmark::Counter::kAvgThreads);
  }
  state.counters["conv_us"] =
      benchmark::Counter(shard.conv_seconds() * 1e6, benchmark::Counter::kAvgThreads);
}

// An exchange by itself, each after the one before.
void bench_exchange(benchmark::State& state) {
  const int rank = state.thread_index();
  check(cudaSetDevice(Group::device_of(rank)));
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const Memory sent(bytes), received(bytes);
  check(cudaMemset(sent.data(), rank + 1, bytes));
  check(cudaMemset(received.data(), 0, bytes));
  OwnStream stream;
  NcclCommunicator& nccl = Group::instance().of(rank);
  const std::vector<DeviceMessage> sends{{1 - rank, static_cast<std::byte*>(sent.data()), bytes}};
  const std::vector<DeviceMessage> receives{
      {1 - rank, static_cast<std::byte*>(received.data()), bytes}};
  check(cudaDeviceSynchronize());
  run_together(state, stream.handle(), [&] {
    const auto done = std::make_shared<comm::Event>(nccl.context());
    nccl.exchange(sends, receives, 0, stream.handle(), done);
    nccl.wait(done, stream.handle());
  });
  unsigned char found = 0;
  check(cudaMemcpy(&found, static_cast<char*>(received.data()) + bytes - 1, 1,
                   cudaMemcpyDeviceToHost));
  if (found != 2 - rank) state.SkipWithError("the result is wrong");
  state.SetBytesProcessed(state.iterations() * kSteps * static_cast<std::int64_t>(bytes));
}

}  // namespace

void close_exchange() {
  if (Group::instance().missing().empty()) Group::instance().close();
}

void register_exchange() {
  const std::string& missing = Group::instance().missing();
  if (!missing.empty()) {
    std::printf("no exchange between ranks: %s\n", missing.c_str());
    return;
  }
  benchmark::RegisterBenchmark("exchange", bench_exchange)
      ->RangeMultiplier(8)
      ->Range(1 << 12, 1 << 24)
      ->Threads(kRanks)
      ->UseManualTime();
  for (const Layer& layer : kLayers) {
    for (const Way way : {Way::kOverlapped, Way::kAwaited, Way::kSilent}) {
      const std::string name =
          std::string("step/") + layer.name + "/" + kWays[static_cast<int>(way)];
      benchmark::RegisterBenchmark(name.c_str(), bench_step, layer, way)
          ->Threads(kRanks)
          ->UseManualTime();
    }
  }
}

}  // namespace pydist::bench
