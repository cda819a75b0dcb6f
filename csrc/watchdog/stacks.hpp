// Python's stacks of all threads of this process, without the interpreter's lock.
#pragma once

#include <pthread.h>

namespace pydist::watchdog {

// Takes over the handler of a signal, which writes the Python stack of the thread that receives it.
void serve_stacks(int signal);

// Sends that signal to `main_thread`, then to every other thread that does not block it.
//
// Each thread writes its own stack, one after another. faulthandler can write those of all threads
// from one, and reads freed memory where another runs meanwhile. Handlers may still write when this
// returns.
void ask_for_stacks(int signal, pthread_t main_thread);

}  // namespace pydist::watchdog
