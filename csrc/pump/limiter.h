// A token bucket for bytes written to the kernel, shared by all streams.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>

namespace p2pavg::pump {

class Limiter {
  public:
    bool on() const { return on_.load(std::memory_order_relaxed); }

    // bytes per second; 0: no limit.
    void set(double rate, double now) {
        std::lock_guard lock(mutex_);
        rate_ = rate;
        tokens_ = 0;
        refilled_ = now;
        on_.store(rate > 0, std::memory_order_relaxed);
    }

    // The number of `want` bytes that may be sent now; 0: none before `retry_in` seconds have passed.
    size_t take(size_t want, double now, double &retry_in) {
        std::lock_guard lock(mutex_);
        if (rate_ <= 0) return want;
        const double burst = std::max(kSlice, rate_ * kBurstSeconds);
        tokens_ = std::min(burst, tokens_ + (now - refilled_) * rate_);
        refilled_ = now;
        const double least = std::min(kSlice, static_cast<double>(want) * kOverhead);
        if (tokens_ < least) {
            retry_in = (least - tokens_) / rate_;
            return 0;
        }
        const size_t granted = std::min(want, std::max<size_t>(1, static_cast<size_t>(tokens_ / kOverhead)));
        tokens_ -= static_cast<double>(granted) * kOverhead;
        return granted;
    }

    void give_back(size_t bytes) {
        std::lock_guard lock(mutex_);
        tokens_ += static_cast<double>(bytes) * kOverhead;
    }

  private:
    static constexpr double kSlice = 16384;
    static constexpr double kBurstSeconds = 0.05;
    // Half of the TCP and IP headers at an MTU of 1500, so that the limit holds within 2.5% with and without headers.
    static constexpr double kOverhead = 1.02;

    std::atomic<bool> on_{false};
    std::mutex mutex_;
    double rate_ = 0;
    double tokens_ = 0;
    double refilled_ = 0;
};

}  // namespace p2pavg::pump
