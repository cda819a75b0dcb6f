// The pool of threads that kernels share.
//
// One caller owns the pool at a time and also works on its tasks. Concurrent callers run their
// tasks alone: no caller waits for the pool. Tasks are handed out one by one, by an atomic counter.
#include "launch/thread_pool.hpp"

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace pydist::launch {
namespace {

constexpr int kMaxThreads = 1024;

int usable_cpus() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int default_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const int threads = std::atoi(text);
    if (threads >= 1) return std::min(threads, kMaxThreads);
  }
  return std::min(usable_cpus(), kMaxThreads);
}

std::atomic<int> configured_threads{0};  // 0: not yet looked up

// One caller's work: each thread takes the next index until there is none left.
struct Job {
  Task task;
  void* context;
  index_t count;
  std::atomic<index_t> next{0};

  std::atomic_flag failed{};
  std::exception_ptr error{};  // of the task that failed first

  void work() {
    try {
      for (index_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(context, i);
    } catch (...) {
      if (!failed.test_and_set()) error = std::current_exception();
      next.store(count);
    }
  }
};

// Workers sleep until a job invites some of them. The caller works too, and then waits for those
// that have started; invitations that no worker has taken by then are withdrawn.
class Pool {
 public:
  // False if another caller has the pool; nothing was done then.
  bool try_run(Job& job, int helpers) {
    const std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner) return false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(workers_.size()) < helpers) {
        workers_.emplace_back([this] { serve(); });
      }
      job_ = &job;
      invited_ = helpers;
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    invited_ = 0;  // workers that have not woken by now are not needed
    done_.wait(lock, [this] { return active_ == 0; });
    job_ = nullptr;
    return true;
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return invited_ > 0; });
      --invited_;
      ++active_;
      Job* job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  std::mutex owner_;  // held by the caller being served
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Job* job_ = nullptr;
  int invited_ = 0;
  int active_ = 0;
};

Pool* current_pool = nullptr;
std::once_flag pool_once;

// Never destroyed: workers sleep in it until the process ends. A forked child has the memory of the
// pool but not its threads, so it gets a new one.
Pool& pool() {
  std::call_once(pool_once, [] {
    current_pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { current_pool = new Pool; });
  });
  return *current_pool;
}

}  // namespace

int num_threads() {
  int threads = configured_threads.load(std::memory_order_relaxed);
  if (threads == 0) {
    threads = default_threads();
    int unset = 0;
    if (!configured_threads.compare_exchange_strong(unset, threads)) threads = unset;
  }
  return threads;
}

void set_num_threads(int threads) {
  PYDIST_EXPECT(threads >= 1 && threads <= kMaxThreads,
                "set_num_threads(" + std::to_string(threads) + "): 1 to " +
                    std::to_string(kMaxThreads) + " are possible");
  configured_threads.store(threads);
}

void run_tasks(index_t count, int threads, Task task, void* context) {
  Job job{task, context, count};
  const int helpers = static_cast<int>(std::min<index_t>(threads, count)) - 1;
  if (helpers < 1 || !pool().try_run(job, helpers)) job.work();
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace pydist::launch
