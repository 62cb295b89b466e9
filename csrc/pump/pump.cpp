#include "pump.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>

#include "clock.h"
#include "kernels.h"

namespace p2pavg::pump {

// The links that one worker pings, and the mutex that guards their list.
struct Pump::Beat {
    std::mutex mutex;
    std::vector<std::shared_ptr<Link>> links;

    void run() {
        std::vector<std::shared_ptr<Link>> now;
        {
            std::lock_guard lock(mutex);
            now = links;
        }
        const double at = monotonic();
        for (auto &link : now) link->ask_ping(at);
    }
};

Pump::Pump(size_t threads) : shared_(new Shared), beat_(std::make_shared<Beat>()) {
    shared_->descriptors.add(shared_->events.fd());
    note_loop();
    for (size_t i = 0; i < std::max<size_t>(1, threads); ++i) workers_.push_back(std::make_unique<Worker>(*shared_));
}

Pump::~Pump() {
    if (abandoned_) {
        for (auto &worker : workers_) static_cast<void>(worker.release());
        new std::unordered_map<int64_t, std::shared_ptr<Link>>(std::move(links_));  // leaked: its mutexes may be held
        return;
    }
    close();
    workers_.clear();
    delete shared_;
}

std::shared_ptr<Link> Pump::known(int64_t id) const {
    auto found = links_.find(id);
    return found == links_.end() ? nullptr : found->second;
}

std::shared_ptr<Link> Pump::link(int64_t id) {
    auto &slot = links_[id];
    if (!slot) {
        slot = std::make_shared<Link>(id);
        std::lock_guard lock(beat_->mutex);
        beat_->links.push_back(slot);
    }
    return slot;
}

// Forgets detached links that no job uses any more.
void Pump::sweep() {
    std::lock_guard lock(beat_->mutex);
    for (auto entry = links_.begin(); entry != links_.end();) {
        // Two references are the pump's own: one in links_, one in the list of links to ping.
        if (entry->second.use_count() > 2 || !entry->second->forgettable()) {
            ++entry;
            continue;
        }
        auto &pinged = beat_->links;
        pinged.erase(std::find(pinged.begin(), pinged.end(), entry->second));
        entry = links_.erase(entry);
    }
}

void Pump::on_all_workers(const std::function<void(Worker &)> &task) {
    Latch latch(workers_.size());
    for (auto &worker : workers_)
        worker->post([&, w = worker.get()] {
            task(*w);
            latch.count_down();
        });
    latch.wait();
}

uint64_t Pump::attach(int64_t id, int64_t stream, int fd, StreamKeys keys) {
    std::shared_ptr<Link> to = closed_ ? nullptr : link(id);
    if (!to || to->find(stream)) {
        ::close(fd);
        throw std::invalid_argument(to ? "this stream is already attached" : "the pump is closed");
    }
    auto least = std::min_element(workers_.begin(), workers_.end(),
                                  [](auto &a, auto &b) { return a->load() < b->load(); });
    Worker &worker = **least;
    std::shared_ptr<Stream> made;
    try {
        made = std::make_shared<Stream>(next_uid_++, stream, fd, to, worker, *shared_, std::move(keys));
    } catch (...) {
        ::close(fd);
        throw;
    }
    worker.reserve();
    to->add(made);
    worker.post([&worker, made] { worker.adopt(made); });
    return made->uid;
}

void Pump::detach(int64_t id, int64_t stream) {
    auto from = known(id);
    if (!from || closed_) return;
    if (auto found = from->find(stream)) {
        from->remove(found.get());
        found->worker().post([found] { found->detach(); });
    }
}

void Pump::detach_all(int64_t id) {
    auto from = known(id);
    if (!from || closed_) return;
    for (auto &stream : from->streams()) {
        from->remove(stream.get());
        stream->worker().post([stream] { stream->detach(); });
    }
    on_all_workers([](Worker &) {});  // wait until all streams are closed, after which nothing reads the blobs
    from->abandon();
    sweep();
}

void Pump::repeat(int64_t id, int64_t stream) {
    auto of = known(id);
    if (!of || closed_) return;
    if (auto found = of->find(stream)) found->worker().post([found] { found->repeat(); });
}

void Pump::pace(int64_t id, double bytes_per_second) {
    auto of = known(id);
    if (!of || closed_) return;
    for (auto &stream : of->streams()) stream->pace(bytes_per_second);
}

std::vector<int64_t> Pump::streams(int64_t id) const {
    std::vector<int64_t> ids;
    if (auto of = known(id))
        for (auto &stream : of->streams()) ids.push_back(stream->id);
    return ids;
}

void Pump::open_reduce(ReduceJob spec, const std::vector<int64_t> &ids) {
    if (closed_) throw std::invalid_argument("the pump is closed");
    std::vector<std::shared_ptr<Link>> links;
    for (size_t rank = 0; rank < ids.size(); ++rank) {
        if ((ids[rank] == kSelf) != (rank == spec.rank)) throw std::invalid_argument("SELF belongs at our own rank, and only there");
        links.push_back(ids[rank] == kSelf ? nullptr : link(ids[rank]));
    }
    auto made = std::make_shared<Job>(std::move(spec), std::move(links), shared_->events, shared_->accumulators);
    if (!shared_->transfers.add(made)) throw std::invalid_argument("this transfer is already open");
}

std::shared_ptr<Job> Pump::job(uint64_t transfer) const {
    return std::dynamic_pointer_cast<Job>(shared_->transfers.find(transfer));
}

void Pump::begin(uint64_t transfer, Start start) {
    auto of = job(transfer);
    if (!of || closed_) throw std::invalid_argument("no such transfer is open");
    of->begin(std::move(start));
    wake_for(of);
}

void Pump::supply(uint64_t transfer, uint32_t ready) {
    auto of = job(transfer);
    if (!of || closed_) throw std::invalid_argument("no such transfer is open");
    of->supply(ready);
    wake_for(of);
}

// Wakes the workers for a job's local chunks, and for frames that were held back until it began.
void Pump::wake_for(const std::shared_ptr<Job> &of) {
    for (auto &worker : workers_)
        worker->post([w = worker.get(), of] {
            if (of->has_local_chunks() && !of->over.load()) w->reduce_locally(of);
            w->resume_held();
        });
}

void Pump::cancel(uint64_t transfer) {
    if (closed_) return;
    auto receiver = shared_->transfers.remove(transfer);
    if (receiver) receiver->over.store(true, std::memory_order_release);
    for (auto &[id, link] : links_) link->purge(transfer, false);
    on_all_workers([&](Worker &worker) {
        if (receiver) worker.release(receiver.get());
        worker.release_blob(transfer);
    });
    for (auto &[id, link] : links_) link->purge(transfer, false);  // frames of closing streams
    receiver.reset();
    sweep();
}

bool Pump::finish(uint64_t transfer) {
    auto of = job(transfer);
    if (!of || closed_) return true;
    of->finish();
    for (auto &link : of->links())
        if (link) link->purge(transfer, true);
    if (!of->joiners_served()) {
        on_all_workers([&](Worker &worker) { worker.settle(of.get()); });
        return false;
    }
    cancel(transfer);
    return true;
}

void Pump::open_blob(uint64_t transfer, uint8_t *buffer, size_t bytes, size_t chunk_bytes) {
    if (closed_) throw std::invalid_argument("the pump is closed");
    if (chunk_bytes == 0 || chunk_bytes > kMaxBodyBytes) throw std::invalid_argument("chunk_bytes must be in 1 .. 4 MiB");
    if (!shared_->transfers.add(std::make_shared<Blob>(transfer, buffer, bytes, chunk_bytes, shared_->events)))
        throw std::invalid_argument("this transfer is already open");
}

void Pump::send_blob(int64_t id, uint64_t transfer, uint32_t chunk, const uint8_t *data, size_t length) {
    if (closed_) throw std::invalid_argument("the pump is closed");
    if (length > kMaxBodyBytes) throw std::invalid_argument("a blob chunk has at most 4 MiB");
    Item item;
    item.kind = Kind::blob;
    item.blob = std::make_shared<OutBlob>(OutBlob{transfer, chunk, data, static_cast<uint32_t>(length)});
    std::vector<Item> one;
    one.push_back(std::move(item));
    link(id)->push(std::move(one));
}

std::vector<StreamStats> Pump::stats(int64_t id) const {
    std::vector<StreamStats> out;
    if (auto of = known(id))
        for (auto &stream : of->streams()) out.push_back(stream->stats());
    return out;
}

std::pair<uint64_t, uint64_t> Pump::traffic(int64_t id) const {
    auto of = known(id);
    if (!of) return {0, 0};
    auto [sent, received] = of->retired();
    for (auto &stream : of->streams()) {
        const StreamStats stats = stream->counters();
        sent += stats.bytes_sent;
        received += stats.bytes_received;
    }
    return {sent, received};
}

Wire Pump::wire(int64_t id) const {
    auto of = known(id);
    return of ? of->wire() : Wire{};
}

LinkHealth Pump::health(int64_t id) const {
    LinkHealth out;
    if (auto of = known(id)) {
        out.last_heard_at = of->last_heard.load();
        for (auto &stream : of->streams())
            out.last_heard_at = std::max(out.last_heard_at, stream->stats().last_received_at);
        out.rtt = of->rtt.load();
        out.loop_age = of->loop_age.load();
        out.trainer_age = of->trainer_age.load();
    }
    return out;
}

void Pump::set_heartbeat(double interval) {
    if (closed_) return;
    Worker *first = workers_.front().get();
    first->post([first, interval, beat = beat_] { first->beat_every(interval, [beat] { beat->run(); }); });
}

void Pump::note_loop() { shared_->loop_seen.store(monotonic(), std::memory_order_relaxed); }
void Pump::note_trainer() { shared_->trainer_seen.store(monotonic(), std::memory_order_relaxed); }

void Pump::set_upload_limit(double bytes_per_second) {
    shared_->limiter.set(bytes_per_second, monotonic());
    if (closed_) return;
    for (auto &worker : workers_) worker->post([w = worker.get()] { w->unthrottle(); });
}

double Pump::cpu_seconds() const {
    double sum = 0;
    for (auto &worker : workers_) sum += worker->cpu_seconds();
    return sum;
}

void Pump::close() {
    if (closed_ || abandoned_) return;
    closed_ = true;
    for (auto &worker : workers_) worker->stop();
    for (auto &[id, link] : links_) link->clear();
    links_.clear();
    beat_->links.clear();
    shared_->transfers.clear();
    shared_->accumulators.clear();
}

void Pump::abandon() {
    if (abandoned_) return;
    closed_ = abandoned_ = true;
    shared_->descriptors.each([](int fd) { ::close(fd); });
}

}  // namespace p2pavg::pump
