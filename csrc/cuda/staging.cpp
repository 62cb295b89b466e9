#include "staging.h"

#include <algorithm>

namespace p2pavg {

Flags::~Flags() {
    for (int *flag : free_) cudaFreeHost(flag);
}

std::shared_ptr<int> Flags::take() {
    int *flag = nullptr;
    {
        std::lock_guard lock(lock_);
        if (!free_.empty()) {
            flag = free_.back();
            free_.pop_back();
        }
    }
    if (!flag) check(cudaHostAlloc(reinterpret_cast<void **>(&flag), sizeof(int), cudaHostAllocPortable), "allocating a flag");
    return {flag, [pool = shared_from_this()](int *back) {
                std::lock_guard lock(pool->lock_);
                pool->free_.push_back(back);
            }};
}

size_t Transfer::done() {
    const DeviceGuard guard(device_);
    while (next_ < pieces_.size()) {
        const cudaError_t state = cudaEventQuery(pieces_[next_].finished->get());
        if (state == cudaErrorNotReady) break;
        check(state, "moving a gradient");
        done_ += pieces_[next_++].chunks;
    }
    return done_;
}

Transfer::~Transfer() {
    for (; next_ < pieces_.size(); next_++) cudaEventSynchronize(pieces_[next_].finished->get());
}

bool Transfer::wait() {
    const DeviceGuard guard(device_);
    for (; next_ < pieces_.size(); next_++) {
        check(cudaEventSynchronize(pieces_[next_].finished->get()), "moving a gradient");
        done_ += pieces_[next_].chunks;
    }
    return !flag_ || *flag_ == 0;
}

void Transfer::hold(cudaStream_t stream) {
    const DeviceGuard guard(device_);
    check(cudaStreamWaitEvent(stream, device_side_->get(), 0), "making a stream wait");
}

Staging::Staging(int device, size_t slot_bytes, int slots) : device_(device), slot_bytes_(slot_bytes) {
    const DeviceGuard guard(device);
    // The streams for encoding have the lowest priority, so that encoding does not slow down the trainer's kernels.
    int least = 0, most = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &most), "asking for stream priorities");
    check(cudaStreamCreateWithPriority(&compute_, cudaStreamNonBlocking, least), "creating a stream");
    check(cudaStreamCreateWithPriority(&copy_, cudaStreamNonBlocking, least), "creating a stream");
    check(cudaMalloc(reinterpret_cast<void **>(&flag_), sizeof(int)), "allocating a flag");
    for (int i = 0; i < slots; i++) {
        slots_.push_back(std::make_unique<Slot>());
        check(cudaMalloc(reinterpret_cast<void **>(&slots_.back()->bytes), slot_bytes), "allocating a staging buffer");
    }
}

Staging::~Staging() {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device_);
    cudaStreamSynchronize(compute_);
    cudaStreamSynchronize(copy_);
    for (auto &slot : slots_) cudaFree(slot->bytes);
    slots_.clear();
    cudaFree(flag_);
    cudaStreamDestroy(compute_);
    cudaStreamDestroy(copy_);
    cudaSetDevice(before);
}

Staging::Plan Staging::plan(int codec, size_t n, size_t chunk) const {
    chunk = std::min(chunk, n);
    const size_t bytes = encoded_size(codec, chunk);
    if (bytes > slot_bytes_)
        throw std::invalid_argument("a chunk of " + std::to_string(bytes) + " bytes is larger than a staging buffer of " +
                                    std::to_string(slot_bytes_));
    return {chunk, bytes, slot_bytes_ / bytes};
}

Staging::Slot &Staging::next_slot() { return *slots_[turn_++ % slots_.size()]; }

void Staging::begin(Transfer &transfer, cudaStream_t first, cudaStream_t stream) {
    transfer.device_ = device_;
    transfer.device_side_ = std::make_unique<Event>();
    check(cudaEventRecord(transfer.device_side_->get(), stream), "recording an event");
    check(cudaStreamWaitEvent(first, transfer.device_side_->get(), 0), "making a stream wait");
}

std::unique_ptr<Transfer> Staging::download(int codec, const float *src, size_t n, size_t chunk, float scale,
                                            const Draws &draws, const Feedback &feedback, uint8_t *host,
                                            cudaStream_t stream) {
    const DeviceGuard guard(device_);
    auto transfer = std::make_unique<Transfer>();
    begin(*transfer, compute_, stream);
    if (n == 0) return transfer;
    const Plan p = plan(codec, n, chunk);
    transfer->flag_ = flags_->take();
    int *flag = transfer->flag_.get();
    check(cudaMemsetAsync(flag_, 0, sizeof(int), compute_), "clearing a flag");
    Draws own = draws;
    for (size_t at = 0; at < n; at += p.chunks_per_piece * p.chunk) {
        const size_t count = std::min(p.chunks_per_piece * p.chunk, n - at), chunks = (count + p.chunk - 1) / p.chunk;
        const size_t bytes = (chunks - 1) * p.chunk_bytes + encoded_size(codec, count - (chunks - 1) * p.chunk);
        Slot &slot = next_slot();
        check(cudaStreamWaitEvent(compute_, slot.free.get(), 0), "making a stream wait");
        own.first = draws.first + at;
        const Feedback here = feedback.owed ? Feedback{feedback.owed + at, feedback.kept + at, feedback.share} : Feedback{};
        check(encode(codec, src + at, count, p.chunk, scale, own, here, slot.bytes, flag_, compute_), "encoding");
        check(cudaEventRecord(transfer->device_side_->get(), compute_), "recording an event");
        check(cudaStreamWaitEvent(copy_, transfer->device_side_->get(), 0), "making a stream wait");
        check(cudaMemcpyAsync(host + at / p.chunk * p.chunk_bytes, slot.bytes, bytes, cudaMemcpyDeviceToHost, copy_),
              "copying to the host");
        if (at + count == n)
            check(cudaMemcpyAsync(flag, flag_, sizeof(int), cudaMemcpyDeviceToHost, copy_), "copying to the host");
        check(cudaEventRecord(slot.free.get(), copy_), "recording an event");
        transfer->pieces_.push_back({std::make_unique<Event>(), chunks});
        check(cudaEventRecord(transfer->pieces_.back().finished->get(), copy_), "recording an event");
    }
    // The next download may clear the flag only after this download's flag has been read.
    check(cudaStreamWaitEvent(compute_, transfer->pieces_.back().finished->get(), 0), "making a stream wait");
    return transfer;
}

std::unique_ptr<Transfer> Staging::upload(int codec, const uint8_t *host, size_t n, size_t chunk, float scale,
                                          float *dst, cudaStream_t stream) {
    const DeviceGuard guard(device_);
    auto transfer = std::make_unique<Transfer>();
    begin(*transfer, compute_, stream);
    if (n == 0) return transfer;
    const Plan p = plan(codec, n, chunk);
    Event copied;
    for (size_t at = 0; at < n; at += p.chunks_per_piece * p.chunk) {
        const size_t count = std::min(p.chunks_per_piece * p.chunk, n - at), chunks = (count + p.chunk - 1) / p.chunk;
        const size_t bytes = (chunks - 1) * p.chunk_bytes + encoded_size(codec, count - (chunks - 1) * p.chunk);
        Slot &slot = next_slot();
        check(cudaStreamWaitEvent(copy_, slot.free.get(), 0), "making a stream wait");
        check(cudaMemcpyAsync(slot.bytes, host + at / p.chunk * p.chunk_bytes, bytes, cudaMemcpyHostToDevice, copy_),
              "copying to the device");
        check(cudaEventRecord(copied.get(), copy_), "recording an event");
        check(cudaStreamWaitEvent(compute_, copied.get(), 0), "making a stream wait");
        check(decode(codec, slot.bytes, count, p.chunk, scale, false, dst + at, nullptr, compute_), "decoding");
        check(cudaEventRecord(slot.free.get(), compute_), "recording an event");
        transfer->pieces_.push_back({std::make_unique<Event>(), chunks});
        check(cudaEventRecord(transfer->pieces_.back().finished->get(), compute_), "recording an event");
    }
    check(cudaEventRecord(transfer->device_side_->get(), compute_), "recording an event");
    return transfer;
}

}  // namespace p2pavg
