// The arithmetic of a job. A contribution is added on arrival, while it is in cache; the pass that adds the last one
// also encodes the result, so that two members need no accumulator.
#include <cstring>

#include "job.h"
#include "kernels.h"

namespace p2pavg::pump {

// This member's contribution to a chunk that it reduces; floats of the source are used as they are, without the codec.
P2pavgTerm Job::own_term(const Chunk &chunk) const {
    const double weight = start_.weights[spec.rank];
    if (start_.encoded)
        return {spec.contribution_codec, start_.encoded + chunk.encoded_at, static_cast<float>(weight)};
    return {P2PAVG_NONE, reinterpret_cast<const uint8_t *>(start_.source + chunk.first),
            static_cast<float>(weight * start_.scale)};
}

void Job::contribute(uint32_t rank, uint32_t index, const uint8_t *body) {
    const Chunk &chunk = chunks_[index];
    Sum &sum = sums_[index];
    Buffer whole;
    bool last, first;
    {
        std::lock_guard lock(stripes_[index % kStripes]);
        if (contributed_[rank * chunks_.size() + index].exchange(1)) return;
        P2pavgTerm terms[2];
        size_t count = 0;
        first = !sum.accumulator;
        if (!first) {
            terms[count++] = {P2PAVG_NONE, sum.accumulator.data(), 1.0f};
        } else if (contributes(spec.rank)) {
            terms[count++] = own_term(chunk);
            ++sum.contributions;
        }
        const int codec = codec_of(rank, index);
        terms[count++] = {codec, body, static_cast<float>(place(index).weights[rank])};
        last = ++sum.contributions == place(index).contributors;
        int finite;
        if (last) {
            finite = p2pavg_sum_encode(terms, count, chunk.count, static_cast<float>(1.0 / place(index).upward),
                                       spec.result_codec, mean_of(index));
            whole = std::move(sum.accumulator);
        } else if (first) {
            sum.accumulator = accumulators_.take(chunk.count * sizeof(float));
            finite = p2pavg_sum_encode(terms, count, chunk.count, 1.0f, P2PAVG_NONE, sum.accumulator.data());
        } else {
            finite = p2pavg_decode_add(codec, body, chunk.count, terms[1].weight,
                                       reinterpret_cast<float *>(sum.accumulator.data()));
        }
        if (!finite) {
            sum.contributions = 0;  // the sum is not finite, and never becomes a result
            refuse(whose_fault(rank, index, body), "its gradient is not finite");
            return;
        }
    }
    accumulators_.give(std::move(whole));
    contributions_received_[rank].fetch_add(1);
    if (first && contributes(spec.rank)) contributions_received_[spec.rank].fetch_add(1);
    if (last) reduced(index);
}

// The member whose value made the sum of a chunk infinite or NaN.
uint32_t Job::whose_fault(uint32_t rank, uint32_t index, const uint8_t *body) {
    const Chunk &chunk = chunks_[index];
    Buffer scratch = accumulators_.take(chunk.count * sizeof(float));
    auto *values = reinterpret_cast<float *>(scratch.data());
    std::memset(values, 0, chunk.count * sizeof(float));
    const auto weight = static_cast<float>(place(index).weights[rank]);
    const bool theirs = !p2pavg_decode_add(codec_of(rank, index), body, chunk.count, weight, values);
    accumulators_.give(std::move(scratch));
    return theirs ? rank : spec.rank;
}

// This member's contribution as it is, into the result. Returns false when a value is not finite.
bool Job::gather_own(const Chunk &chunk) {
    uint8_t *const out = spec.result + chunk.result_at;
    if (!start_.encoded)
        return p2pavg_encode(spec.contribution_codec, start_.source + (chunk.first - own_element_), chunk.count,
                             static_cast<float>(start_.scale), out) != 0;
    std::memcpy(out, start_.encoded + (chunk.encoded_at - own_byte_), chunk.result_length);
    return true;
}

// Returns false when a value is not finite.
bool Job::mean_of_own(uint32_t index) {
    const Chunk &chunk = chunks_[index];
    const P2pavgTerm own = own_term(chunk);
    return p2pavg_sum_encode(&own, 1, chunk.count, static_cast<float>(1.0 / place(index).upward), spec.result_codec,
                             mean_of(index)) != 0;
}

bool Job::has_local_chunks() const {
    const uint32_t next = next_local_.load();
    return next < local_chunks_.size() && supplied(local_chunks_[next]);
}

bool Job::reduce_local_chunk() {
    uint32_t next = next_local_.load();
    do {
        if (!has_local_chunks() || over.load(std::memory_order_acquire)) return false;
        if (next >= local_chunks_.size() || !supplied(local_chunks_[next])) return false;
    } while (!next_local_.compare_exchange_weak(next, next + 1));
    const uint32_t index = local_chunks_[next];
    const Chunk &chunk = chunks_[index];
    if (!(spec.gathers ? gather_own(chunk) : mean_of_own(index))) {
        refuse(spec.rank, "its gradient is not finite");
        return true;
    }
    contributions_received_[spec.rank].fetch_add(1);
    reduced(index);
    return true;
}

uint8_t *Job::mean_of(uint32_t index) {
    if (mine(index)) return result_of(index);
    partials_[index] = accumulators_.take(chunks_[index].result_length);
    return partials_[index].data();
}

void Job::send_one(Kind kind, uint32_t rank, uint32_t index) {
    std::vector<Item> one;
    one.push_back({kind, false, rank, index, 0, shared_from_this(), {}});
    links_[rank]->push(std::move(one));
}

// Called when the encoded mean of a chunk is in place. At the part's owner it is the result, the same bytes for all.
void Job::reduced(uint32_t index) {
    if (!mine(index)) {
        send_one(Kind::contribution, parent(index), index);
        return;
    }
    crcs_[index] = p2pavg_crc32(0, result_of(index), chunks_[index].result_length);  // before a stream can send it
    landing.finish(index);
    in_place(index);
}

void Job::landed(uint32_t index, uint32_t crc) {
    crcs_[index] = crc;
    in_place(index);
}

void Job::in_place(uint32_t index) {
    for (uint32_t child : place(index).children) send_one(Kind::result, child, index);
    results_received_[parent(index)].fetch_add(1);
    if (results_left_.fetch_sub(1) == 1) maybe_done();
}

}  // namespace p2pavg::pump
