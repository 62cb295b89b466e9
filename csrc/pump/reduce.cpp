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
    if (swaps_with(index, rank)) return keep_other(rank, index, body);
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
            sum.whole = finite;
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
            refuse(whose_fault(rank, index, body), "its contribution is not finite");
            return;
        }
    }
    accumulators_.give(std::move(whole));
    contributions_received_[rank].fetch_add(1);
    if (first && contributes(spec.rank)) contributions_received_[spec.rank].fetch_add(1);
    if (last) reduced(index);
}

// The partner's mean of a swapped chunk: it waits for this member's.
void Job::keep_other(uint32_t rank, uint32_t index, const uint8_t *body) {
    {
        std::lock_guard lock(stripes_[index % kStripes]);
        if (contributed_[rank * chunks_.size() + index].exchange(1)) return;
        sums_[index].other = accumulators_.take(chunks_[index].result_length);
        std::memcpy(sums_[index].other.data(), body, chunks_[index].result_length);
    }
    contributions_received_[rank].fetch_add(1);
    unite(index);
}

bool Job::both_here(uint32_t index) const {
    const Sum &sum = sums_[index];
    const Place &at = place(index);
    return (sum.whole || at.contributors == 0) && (sum.other || !(at.weights[at.partner] > 0));
}

// Makes the result of a swapped chunk once both means are here: of both as they are encoded, the owner's first, so that
// this member and its partner have the same bits.
void Job::unite(uint32_t index) {
    const Chunk &chunk = chunks_[index];
    const Place &at = place(index);
    Buffer other;
    {
        std::lock_guard lock(stripes_[index % kStripes]);
        if (!both_here(index) || landing.done(index)) return;
        other = std::move(sums_[index].other);
        double total = 0;
        for (double weight : start_.weights) total += weight;
        P2pavgTerm terms[2];
        size_t count = 0;
        const bool owns = spec.parts[chunk.part].owner == spec.rank;
        for (const bool own : {owns, !owns}) {
            const double weight = own ? at.upward : at.weights[at.partner];
            const uint8_t *mean = own ? partials_[index].data() : other.data();
            if (weight > 0) terms[count++] = {spec.result_codec, mean, static_cast<float>(weight)};
        }
        if (!p2pavg_sum_encode(terms, count, chunk.count, static_cast<float>(1.0 / total), spec.result_codec,
                               result_of(index))) {
            refuse(other ? whose_fault(at.partner, index, other.data()) : spec.rank, "its contribution is not finite");
            return;
        }
        crcs_[index] = p2pavg_crc32(0, result_of(index), chunk.result_length);
        landing.finish(index);
    }
    accumulators_.give(std::move(other));
    in_place(index);
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
    std::lock_guard lock(stripes_[index % kStripes]);
    return sums_[index].whole = p2pavg_sum_encode(&own, 1, chunk.count, static_cast<float>(1.0 / place(index).upward),
                                                  spec.result_codec, mean_of(index)) != 0;
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
        refuse(spec.rank, "its contribution is not finite");
        return true;
    }
    contributions_received_[spec.rank].fetch_add(1);
    reduced(index);
    return true;
}

uint8_t *Job::mean_of(uint32_t index) {
    if (receiver(index) == spec.rank) return result_of(index);
    partials_[index] = accumulators_.take(chunks_[index].result_length);
    return partials_[index].data();
}

void Job::send_one(Kind kind, uint32_t rank, uint32_t index) {
    std::vector<Item> one;
    one.push_back(frame(kind, rank, index));
    links_[rank]->push(std::move(one));
}

// Called when the encoded mean of a chunk is in place. It goes to the receiver; without one it is the result.
void Job::reduced(uint32_t index) {
    if (receiver(index) != spec.rank) {
        send_one(Kind::contribution, receiver(index), index);
        if (place(index).partner != kNobody) unite(index);
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
