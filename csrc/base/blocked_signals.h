#pragma once

// Signals go to threads of the host program, and never to those of the engine.

#include <signal.h>

namespace torch_ckpt {

// Blocks all signals of the calling thread for the lifetime of the object. Threads that are started
// meanwhile inherit the mask and never restore it.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace torch_ckpt
