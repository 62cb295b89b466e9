#include "nat.h"

namespace lab {
namespace {

constexpr size_t kMostFlows = 4096;
constexpr Nanoseconds kTcpIdle = 300'000'000'000;  // as short as the timeout of home routers
constexpr Nanoseconds kIdle = 30'000'000'000;

bool expired(FlowKey flow, Nanoseconds seen, Nanoseconds now) {
    return now - seen > (protocol_of(flow) == 6 ? kTcpIdle : kIdle);
}

}  // namespace

void Nat::sent(FlowKey flow, Nanoseconds now) {
    const auto known = seen_.find(flow);
    if (known != seen_.end()) {
        known->second = now;
        return;
    }
    if (seen_.size() >= kMostFlows)
        std::erase_if(seen_, [&](const auto& item) { return expired(item.first, item.second, now); });
    if (seen_.size() < kMostFlows) seen_.emplace(flow, now);
}

bool Nat::admits(FlowKey arriving, Nanoseconds now) {
    const auto known = seen_.find(reversed(arriving));
    if (known == seen_.end()) return false;
    if (expired(known->first, known->second, now)) {
        seen_.erase(known);
        return false;
    }
    known->second = now;
    return true;
}

}  // namespace lab
