#include "link.h"

#include <algorithm>
#include <iterator>

#include "job.h"
#include "stream.h"

namespace p2pavg::pump {

namespace {

template <typename Predicate>
void erase_if(std::deque<Item> &queue, Predicate predicate) {
    queue.erase(std::remove_if(queue.begin(), queue.end(), predicate), queue.end());
}

}  // namespace

uint64_t Item::transfer() const { return job ? job->transfer : blob ? blob->transfer : 0; }

std::deque<Item> &Link::queue_of(const Item &item) {
    if (item.kind == Kind::contribution) return contributions_;
    if (item.kind == Kind::blob) return blobs_;
    return item.job->is_voter(item.rank) ? results_ : joiners_;
}

void Link::put(Item item) {
    std::deque<Item> &queue = queue_of(item);
    auto at = queue.end();
    if (item.kind == Kind::contribution)
        while (at != queue.begin() && std::prev(at)->job == item.job && std::prev(at)->turn > item.turn) --at;
    queue.insert(at, std::move(item));
}

std::vector<std::shared_ptr<Stream>> Link::take_idle(size_t most) {
    std::vector<std::shared_ptr<Stream>> taken;
    while (!idle_.empty() && taken.size() < most) {  // the stream that has been idle longest comes first
        taken.push_back(std::move(idle_.front()));
        idle_.pop_front();
    }
    return taken;
}

void Link::push(std::vector<Item> items) {
    std::vector<std::shared_ptr<Stream>> woken;
    {
        std::lock_guard lock(mutex_);
        woken = take_idle(items.size());
        for (Item &item : items) put(std::move(item));
    }
    for (auto &stream : woken) stream->wake();
}

void Link::push_front(std::vector<Item> items) {
    std::vector<std::shared_ptr<Stream>> woken;
    {
        std::lock_guard lock(mutex_);
        woken = take_idle(items.size());
        for (auto item = items.rbegin(); item != items.rend(); ++item) {
            std::deque<Item> &queue = queue_of(*item);
            queue.push_front(std::move(*item));
        }
    }
    for (auto &stream : woken) stream->wake();
}

void Link::push_elsewhere(std::vector<Item> items, const std::shared_ptr<Stream> &than) {
    {
        std::lock_guard lock(mutex_);
        auto found = std::find(idle_.begin(), idle_.end(), than);
        if (found != idle_.end()) std::rotate(found, found + 1, idle_.end());
    }
    for (Item &item : items) item.not_over = than->uid;
    push_front(std::move(items));
}

bool Link::pop(Item &out, const std::shared_ptr<Stream> &by) {
    std::lock_guard lock(mutex_);
    if (pong_) {
        out = {Kind::pong, false, 0, 0, *pong_, {}, {}};
        pong_.reset();
        return true;
    }
    if (ping_) {
        out = {Kind::ping, false, 0, 0, *ping_, {}, {}};
        ping_.reset();
        return true;
    }
    for (auto *queue : {&contributions_, &results_}) {
        auto item = std::find_if(queue->begin(), queue->end(), [&](const Item &i) { return i.not_over != by->uid; });
        if (item == queue->end()) continue;
        out = std::move(*item);
        queue->erase(item);
        return true;
    }
    for (auto item = joiners_.begin(); item != joiners_.end(); ++item) {
        if (!item->job->voters_served() || item->not_over == by->uid) continue;  // results for joiners are sent last
        out = std::move(*item);
        joiners_.erase(item);
        return true;
    }
    if (!blobs_.empty()) {
        out = std::move(blobs_.front());
        blobs_.pop_front();
        return true;
    }
    if (std::find(idle_.begin(), idle_.end(), by) == idle_.end()) idle_.push_back(by);
    return false;
}

void Link::purge(uint64_t transfer, bool only_voters) {
    std::lock_guard lock(mutex_);
    auto of_transfer = [&](const Item &item) { return item.transfer() == transfer; };
    erase_if(contributions_, of_transfer);
    erase_if(results_, of_transfer);
    if (only_voters) return;
    erase_if(joiners_, of_transfer);
    erase_if(blobs_, of_transfer);
}

void Link::abandon() {
    std::deque<Item> orphans;
    {
        std::lock_guard lock(mutex_);
        detached_ = true;
        retired_sent_ = retired_received_ = 0;
        retired_wire_ = {};
        blobs_.clear();
        auto last = std::stable_partition(joiners_.begin(), joiners_.end(),
                                          [](const Item &item) { return !item.job->finished(); });
        std::move(last, joiners_.end(), std::back_inserter(orphans));
        joiners_.erase(last, joiners_.end());
    }
    for (const Item &item : orphans) item.job->sent(item);
}

void Link::clear() {
    std::lock_guard lock(mutex_);
    for (auto *queue : {&contributions_, &results_, &joiners_, &blobs_}) queue->clear();
}

void Link::wake() {
    std::vector<std::shared_ptr<Stream>> woken;
    {
        std::lock_guard lock(mutex_);
        woken = take_idle(idle_.size());
    }
    for (auto &stream : woken) stream->wake();
}

void Link::add(std::shared_ptr<Stream> stream) {
    std::lock_guard lock(mutex_);
    streams_.push_back(std::move(stream));
    detached_ = false;
}

bool Link::remove(const Stream *stream) {
    std::lock_guard lock(mutex_);
    auto same = [&](const std::shared_ptr<Stream> &other) { return other.get() == stream; };
    idle_.erase(std::remove_if(idle_.begin(), idle_.end(), same), idle_.end());
    auto found = std::find_if(streams_.begin(), streams_.end(), same);
    if (found == streams_.end()) return false;
    const StreamStats stats = stream->counters();
    retired_sent_ += stats.bytes_sent;
    retired_received_ += stats.bytes_received;
    retired_wire_ += stream->wire();
    streams_.erase(found);
    return true;
}

std::pair<uint64_t, uint64_t> Link::retired() const {
    std::lock_guard lock(mutex_);
    return {retired_sent_, retired_received_};
}

Wire Link::wire() const {
    std::lock_guard lock(mutex_);
    Wire out = retired_wire_;
    for (const auto &stream : streams_) out += stream->wire();
    return out;
}

std::vector<std::shared_ptr<Stream>> Link::streams() const {
    std::lock_guard lock(mutex_);
    return streams_;
}

size_t Link::open_streams() const {
    std::lock_guard lock(mutex_);
    return streams_.size();
}

std::shared_ptr<Stream> Link::find(int64_t stream) const {
    std::lock_guard lock(mutex_);
    for (const auto &candidate : streams_)
        if (candidate->id == stream) return candidate;
    return nullptr;
}

bool Link::forgettable() const {
    std::lock_guard lock(mutex_);
    return detached_ && streams_.empty() && contributions_.empty() && results_.empty() && joiners_.empty() && blobs_.empty();
}

void Link::ask_ping(double now) {
    std::vector<std::shared_ptr<Stream>> woken;
    {
        std::lock_guard lock(mutex_);
        if (streams_.empty()) return;
        const bool due = now - std::min(asked_at_, last_ping_.load(std::memory_order_relaxed)) >= kAnswerS;
        if (due) asked_at_ = now;
        const bool unsent = ping_ && *ping_ != kNoAnswer;  // the one that this one replaces asks for an answer
        ping_ = due || unsent ? static_cast<uint64_t>(now * 1e9) : kNoAnswer;
        woken = take_idle(1);
    }
    for (auto &stream : woken) stream->wake();
}

void Link::ask_pong(uint64_t stamp) {
    std::vector<std::shared_ptr<Stream>> woken;
    {
        std::lock_guard lock(mutex_);
        pong_ = stamp;
        woken = take_idle(1);
    }
    for (auto &stream : woken) stream->wake();
}

void Link::heard_ages(const Heartbeat &beat) {
    loop_age.store(beat.loop_age, std::memory_order_relaxed);
    trainer_age.store(beat.trainer_age, std::memory_order_relaxed);
}

void Link::heard_pong(double sample) {
    const double known = rtt.load(std::memory_order_relaxed);
    rtt.store(known > 0 ? known + (sample - known) / 8 : sample, std::memory_order_relaxed);
}

}  // namespace p2pavg::pump
