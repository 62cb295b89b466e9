// The arithmetic of a job: contributions are added as they arrive, and the last one turns the sum into the result.
#include <cstring>

#include "job.h"
#include "kernels.h"

namespace p2pavg::pump {

// sum <- weight * own contribution, or 0 without one. False when it is not finite.
bool Job::add_own(const Chunk &chunk, float *sum) {
    const double weight = start_.weights[spec.rank];
    if (weight <= 0) {
        std::memset(sum, 0, chunk.count * sizeof(float));
        return true;
    }
    contributions_received_[spec.rank].fetch_add(1);
    if (start_.source)
        return p2pavg_encode(P2PAVG_NONE, start_.source + chunk.first, chunk.count,
                             static_cast<float>(weight * start_.scale), reinterpret_cast<uint8_t *>(sum)) != 0;
    std::memset(sum, 0, chunk.count * sizeof(float));
    return p2pavg_decode_add(spec.contribution_codec, start_.encoded + chunk.encoded_at, chunk.count,
                             static_cast<float>(weight), sum) != 0;
}

void Job::contribute(uint32_t rank, uint32_t index, const uint8_t *body) {
    const Chunk &chunk = chunks_[index];
    Sum &sum = sums_[index];
    Buffer whole;
    {
        std::lock_guard lock(stripes_[index % kStripes]);
        if (contributed_[rank * chunks_.size() + index].exchange(1)) return;
        if (!sum.accumulator) {
            sum.accumulator = accumulators_.take(chunk.count * sizeof(float));
            // What is refused is not counted, so that the sum never becomes a result.
            if (!add_own(chunk, reinterpret_cast<float *>(sum.accumulator.data())))
                refuse(spec.rank, "its gradient is not finite");
            else if (contributes(spec.rank))
                ++sum.contributions;
        }
        auto *total = reinterpret_cast<float *>(sum.accumulator.data());
        if (!p2pavg_decode_add(spec.contribution_codec, body, chunk.count, static_cast<float>(start_.weights[rank]), total)) {
            refuse(rank, "its gradient is not finite");
            return;
        }
        if (++sum.contributions == contributors_) whole = std::move(sum.accumulator);
    }
    contributions_received_[rank].fetch_add(1);
    if (!whole) return;
    reduced(index, reinterpret_cast<const float *>(whole.data()));
    accumulators_.give(std::move(whole));
}

bool Job::has_local_chunks() const {
    return contributes(spec.rank) && contributors_ == 1 && next_local_.load() < own_chunks_.size();
}

bool Job::reduce_local_chunk() {
    if (!has_local_chunks() || over.load(std::memory_order_acquire)) return false;
    const uint32_t next = next_local_.fetch_add(1);
    if (next >= own_chunks_.size()) return false;
    const Chunk &chunk = chunks_[own_chunks_[next]];
    Buffer buffer = accumulators_.take(chunk.count * sizeof(float));
    auto *sum = reinterpret_cast<float *>(buffer.data());
    if (add_own(chunk, sum)) reduced(own_chunks_[next], sum);
    else refuse(spec.rank, "its gradient is not finite");
    accumulators_.give(std::move(buffer));
    return true;
}

// The sum of one of our chunks is complete: encode the mean once, for everybody.
void Job::reduced(uint32_t index, const float *sum) {
    const Chunk &chunk = chunks_[index];
    uint8_t *out = spec.result + chunk.result_at;
    if (!p2pavg_encode(spec.result_codec, sum, chunk.count, static_cast<float>(1.0 / total_weight_), out)) {
        refuse(spec.rank, "its part's mean is not finite");
        return;
    }
    crcs_[index] = p2pavg_crc32(0, out, chunk.result_length);  // before anybody can send the chunk
    landing.finish(index);
    for (uint32_t rank = 0; rank < links_.size(); ++rank) {
        if (rank == spec.rank) continue;
        std::vector<Item> one;
        one.push_back({Kind::result, false, rank, index, 0, shared_from_this(), {}});
        links_[rank]->push(std::move(one));
    }
    in_place(index);
}

void Job::landed(uint32_t index, uint32_t crc) {
    crcs_[index] = crc;
    in_place(index);
}

void Job::in_place(uint32_t index) {
    results_received_[owner(index)].fetch_add(1);
    if (results_left_.fetch_sub(1) == 1) maybe_done();
}

}  // namespace p2pavg::pump
