#include "job.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "clock.h"
#include "kernels.h"
#include "sparse.h"

namespace p2pavg::pump {

Job::Job(ReduceJob given, std::vector<std::shared_ptr<Link>> links, EventQueue &events, BufferPool &accumulators)
    : Receiver(given.transfer,
               [&] {
                   size_t chunks = 0;
                   if (given.chunk_elements == 0) throw std::invalid_argument("chunk_elements must be positive");
                   for (const Part &part : given.parts)
                       chunks += (part.count + given.chunk_elements - 1) / given.chunk_elements;
                   if (chunks >= UINT32_MAX) throw std::invalid_argument("too many chunks");
                   return chunks;
               }()),
      spec(std::move(given)), links_(std::move(links)), events_(events), accumulators_(accumulators) {
    const size_t ranks = links_.size();
    if (spec.voters.size() != ranks) throw std::invalid_argument("as many voters as links are needed");
    if (spec.rank >= ranks) throw std::invalid_argument("rank is not among the links");
    if (p2pavg_encoded_size(spec.contribution_codec, 1) == 0 || p2pavg_encoded_size(spec.result_codec, 1) == 0)
        throw std::invalid_argument("unknown codec");
    if (p2pavg_encoded_size(spec.contribution_codec, spec.chunk_elements) > kMaxBodyBytes ||
        p2pavg_encoded_size(spec.result_codec, spec.chunk_elements) > kMaxBodyBytes)
        throw std::invalid_argument("chunk_elements makes frames larger than 4 MiB");
    const bool sparse = p2pavg_sparse_size(spec.contribution_codec, 1) && p2pavg_sparse_size(spec.result_codec, 1);
    if (spec.gathers != sparse) throw std::invalid_argument("what is sparse is gathered, and nothing else");
    chunks_.reserve(landing.size());
    uint64_t result_at = 0, encoded_at = 0, element = 0;
    for (uint32_t p = 0; p < spec.parts.size(); ++p) {
        const Part &part = spec.parts[p];
        if (part.owner >= ranks || !is_voter(part.owner)) throw std::invalid_argument("a part's owner must be a voter");
        if (!part.deputies.empty() && spec.groups.size() != ranks)
            throw std::invalid_argument("a plan with deputies names the group of each member");
        for (uint32_t deputy : part.deputies)
            if (deputy >= ranks || !is_voter(deputy) || deputy == part.owner)
                throw std::invalid_argument("a part's deputies must be voters, and not its owner");
        if (part.swaps && (part.deputies.size() != 1 || spec.gathers))
            throw std::invalid_argument("a part that is swapped has one deputy");
        Place place{parent_of(part, spec.rank), false, {}, kNobody, {}};
        for (uint32_t rank = 0; rank < ranks; ++rank) {
            const bool child = rank != spec.rank && rank != part.owner && parent_of(part, rank) == spec.rank;
            child_.push_back(child);
            if (child) place.children.push_back(rank);
        }
        place.reduces = sums_up(part, spec.rank);
        if (part.swaps && place.reduces) place.partner = spec.rank == part.owner ? part.deputies[0] : part.owner;
        places_.push_back(std::move(place));
        if (part.start != element) throw std::invalid_argument("parts must cover the vector in order");
        first_chunk_.push_back(static_cast<uint32_t>(chunks_.size()));
        if (spec.gathers && part.owner == spec.rank) {
            own_chunk_ = first_chunk_.back();
            own_element_ = element;
            own_byte_ = encoded_at;
        }
        for (uint64_t done = 0, i = 0; done < part.count; done += spec.chunk_elements, ++i) {
            const uint64_t rest = part.count - done;
            const uint32_t count = rest < spec.chunk_elements ? static_cast<uint32_t>(rest) : spec.chunk_elements;
            const auto result_length = static_cast<uint32_t>(p2pavg_encoded_size(spec.result_codec, count));
            const auto encoded_length = static_cast<uint32_t>(p2pavg_encoded_size(spec.contribution_codec, count));
            chunks_.push_back({part.start + done, count, p, static_cast<uint32_t>(i), result_at, encoded_at,
                               result_length, encoded_length});
            result_at += result_length;
            encoded_at += encoded_length;
        }
        element += part.count;
    }
    first_chunk_.push_back(static_cast<uint32_t>(chunks_.size()));
    if (spec.result_bytes != result_at) throw std::invalid_argument("result does not have the size of the encoded layout");
    elements_ = spec.gathers && !spec.parts.empty() ? spec.parts[0].count : element;
    encoded_bytes_ = spec.gathers && !spec.parts.empty() ? encoded_at / spec.parts.size() : encoded_at;
    sums_.resize(chunks_.size());
    partials_.resize(chunks_.size());
    crcs_.resize(chunks_.size());
    contributed_.reset(new std::atomic<uint8_t>[ranks * chunks_.size()]());
    sent_.reset(new std::atomic<uint8_t>[ranks * chunks_.size()]());
    refused_.reset(new std::atomic<uint8_t>[ranks]());
    for (auto *counts : {&contributions_received_, &results_received_, &contributions_sent_, &results_sent_})
        counts->reset(new std::atomic<uint32_t>[ranks]());
    results_left_ = static_cast<uint32_t>(chunks_.size());
}

Job::~Job() {
    for (Sum &sum : sums_) {
        accumulators_.give(std::move(sum.accumulator));
        accumulators_.give(std::move(sum.other));
    }
    for (Buffer &partial : partials_) accumulators_.give(std::move(partial));
}

bool Job::is_partial(uint32_t chunk, uint32_t rank) const {
    const Part &part = spec.parts[chunks_[chunk].part];
    return rank == part.owner ? part.swaps : sums_up(part, rank);
}

bool Job::sums_up(const Part &part, uint32_t rank) const {
    return rank == part.owner || std::find(part.deputies.begin(), part.deputies.end(), rank) != part.deputies.end();
}

uint32_t Job::parent_of(const Part &part, uint32_t rank) const {
    if (sums_up(part, rank)) return part.swaps ? rank : part.owner;
    for (uint32_t deputy : part.deputies)
        if (spec.groups[deputy] == spec.groups[rank]) return deputy;
    return part.owner;
}

// The weight of what `rank` sends: added up in rank order, as its Python twin does and the partner must.
double Job::subtree(const Part &part, uint32_t rank) const {
    if (!sums_up(part, rank)) return start_.weights[rank];
    double weight = 0;
    for (uint32_t other = 0; other < links_.size(); ++other)
        if (other == rank || (!sums_up(part, other) && parent_of(part, other) == rank)) weight += start_.weights[other];
    return weight;
}

void Job::settle_weights() {
    double total = 0;
    for (double weight : start_.weights) total += weight;
    for (uint32_t p = 0; p < spec.parts.size(); ++p) {
        Place &place = places_[p];
        const Part &part = spec.parts[p];
        place.upward = part.owner == spec.rank && !part.swaps ? total : subtree(part, spec.rank);
        if (spec.gathers) place.upward = part.owner == spec.rank ? start_.weights[spec.rank] : 0;
        if (!place.reduces) continue;
        place.weights.assign(links_.size(), 0);
        place.weights[spec.rank] = start_.weights[spec.rank];
        for (uint32_t child : place.children) place.weights[child] = spec.gathers ? 0 : subtree(part, child);
        for (double weight : place.weights) place.contributors += weight > 0;
        if (place.partner != kNobody) place.weights[place.partner] = subtree(part, place.partner);
        if (place.contributors == 1 && contributes(spec.rank))
            for (uint32_t c = first_chunk_[p]; c < first_chunk_[p + 1]; ++c) local_chunks_.push_back(c);
    }
}

// Chunks that nobody sends, as their owner has no weight: zeros.
void Job::fill_absent() {
    for (uint32_t c = 0; spec.gathers && c < chunks_.size(); ++c) {
        const Chunk &chunk = chunks_[c];
        if (contributes(spec.parts[chunk.part].owner)) continue;
        std::memset(result_of(c), 0, chunk.result_length);
        crcs_[c] = p2pavg_crc32(0, result_of(c), chunk.result_length);
        landing.finish(c);
        results_received_[parent(c)].fetch_add(1);
        results_left_.fetch_sub(1);
    }
}

bool Job::is_sound(uint32_t chunk, const uint8_t *body) const {
    return !spec.gathers || p2pavg_sparse_check(spec.result_codec, body, chunks_[chunk].count);
}

// The number behind the first `ready` chunks of this member's contribution.
uint32_t Job::chunks_before(uint32_t ready) const {
    const auto all = static_cast<uint32_t>(chunks_.size());
    return own_chunk_ + std::min(ready, all - own_chunk_);
}

void Job::begin(Start start) {
    if (begun()) throw std::invalid_argument("this transfer has begun already");
    const std::vector<double> &weights = start.weights;
    if (weights.size() != links_.size()) throw std::invalid_argument("as many weights as members are needed");
    double total = 0;
    for (double weight : weights) {
        if (!(weight >= 0 && weight <= 1e300)) throw std::invalid_argument("weights must be finite and not negative");
        total += weight;
    }
    if (!(total > 0 && total <= 1e300)) throw std::invalid_argument("at least one weight must be positive");
    if (start.source && start.encoded) throw std::invalid_argument("source and encoded exclude each other");
    if (weights[spec.rank] > 0 && elements_ > 0 && !start.source && !start.encoded)
        throw std::invalid_argument("a member with weight needs something to contribute");
    if (start.source && start.source_elements != elements_)
        throw std::invalid_argument("source does not have as many elements as the parts");
    if (start.encoded && start.encoded_bytes != encoded_bytes_)
        throw std::invalid_argument("encoded does not have the size of the encoded layout");
    start_ = std::move(start);
    settle_weights();

    uint32_t voter_sends = 0, joiner_sends = 0;
    for (uint32_t p = 0; p < places_.size(); ++p) {
        const uint32_t length = first_chunk_[p + 1] - first_chunk_[p];
        if (!spec.gathers || places_[p].upward > 0)
            for (uint32_t child : places_[p].children) (is_voter(child) ? voter_sends : joiner_sends) += length;
        const bool sends_on = places_[p].parent != spec.rank || places_[p].partner != kNobody;
        if (sends_on && places_[p].upward > 0) voter_sends += length;
    }
    const bool sends = contributes(spec.rank);
    voter_sends_left_ = voter_sends;
    joiner_sends_left_ = joiner_sends;
    supplied_ = chunks_before(start_.ready);
    fill_absent();
    begun_.store(true, std::memory_order_release);

    if (sends) send_contributions(0, supplied_);
    maybe_done();
}

void Job::supply(uint32_t ready) {
    if (!begun()) throw std::invalid_argument("this transfer has not begun");
    const uint32_t before = supplied_, now = chunks_before(ready);
    if (now <= before) return;
    supplied_.store(now, std::memory_order_release);
    if (contributes(spec.rank)) send_contributions(before, now);
}

// All parts advance together: a deputy that got one after the other would use its links to owners one after the other.
Item Job::frame(Kind kind, uint32_t rank, uint32_t chunk, bool repeat) {
    const auto [part, index] = std::pair(chunks_[chunk].part, uint64_t{chunks_[chunk].index});
    const uint64_t chunks = first_chunk_[part + 1] - first_chunk_[part];
    return {kind, repeat, rank, chunk, 0, shared_from_this(), {}, 0, static_cast<double>(2 * index + 1) / (2 * chunks)};
}

void Job::send_contributions(uint32_t first, uint32_t end) {
    std::vector<std::vector<Item>> items(links_.size());
    for (uint32_t c = first; c < end; ++c) {
        if (place(c).reduces || !(place(c).upward > 0)) continue;
        items[parent(c)].push_back(frame(Kind::contribution, parent(c), c));
    }
    for (uint32_t rank = 0; rank < links_.size(); ++rank) {
        std::stable_sort(items[rank].begin(), items[rank].end(),
                         [](const Item &a, const Item &b) { return a.turn < b.turn; });
        if (!items[rank].empty()) links_[rank]->push(std::move(items[rank]));
    }
}

bool Job::find(uint32_t part, uint32_t index, uint32_t &chunk) const {
    if (part >= spec.parts.size()) return false;
    if (index >= first_chunk_[part + 1] - first_chunk_[part]) return false;
    chunk = first_chunk_[part] + index;
    return true;
}

// A packed chunk is shorter than the chunk.
bool Job::fits(const Header &header, uint32_t length) {
    return header.flags & kFlagPacked ? header.length < length : header.length == length;
}

Job::Verdict Job::admit(const Header &header, const Link &from, uint32_t &chunk) {
    if (over.load(std::memory_order_acquire)) return Verdict::discard;
    const bool contribution = header.kind == Kind::contribution;
    uint32_t rank = 0;
    while (rank < links_.size() && links_[rank].get() != &from) ++rank;
    if (rank == links_.size() || refused_[rank].load(std::memory_order_relaxed)) return Verdict::discard;
    const bool known = find(header.part, header.chunk, chunk);
    if (!begun() && (contribution || spec.gathers || (known && !place(chunk).children.empty()))) return Verdict::hold;
    const char *why = nullptr;
    if (!known) {
        why = "a chunk that the vector does not have";
    } else if (header.sender != rank) {
        why = "a chunk in another member's name";
    } else if (contribution ? !is_child(chunk, rank) && !swaps_with(chunk, rank) : parent(chunk) != rank) {
        why = "a chunk of a part that is not its own to send";
    } else if (const bool plain = contribution && !is_partial(chunk, rank);
               header.codec != (plain ? spec.contribution_codec : spec.result_codec)) {
        why = "a chunk in another codec";
    } else if (header.count != chunks_[chunk].count ||
               !fits(header, plain ? chunks_[chunk].encoded_length : chunks_[chunk].result_length)) {
        why = "a chunk of the wrong size";
    } else if (contribution && !(place(chunk).weights[rank] > 0)) {
        why = "a contribution of a member without weight";
    }
    if (why) {
        refuse(rank, why);
        return Verdict::discard;
    }
    // The contribution is added to this member's own, so it has to wait until that chunk is in place.
    if (contribution && contributes(spec.rank) && !supplied(chunk) && !swaps_with(chunk, rank)) return Verdict::hold;
    if (contribution)
        return contributed_[rank * chunks_.size() + chunk].load(std::memory_order_acquire) ? Verdict::discard
                                                                                            : Verdict::accept;
    return landing.done(chunk) ? Verdict::discard : Verdict::accept;
}

void Job::refuse(uint32_t rank, const char *why) {
    if (refused_[rank].exchange(1)) return;
    events_.post({Event::Type::job_refused, 0, 0, transfer, rank, why});
}

void Job::touch(double now) {
    if (first_byte_at_.load(std::memory_order_relaxed) == 0) {
        double never = 0;
        first_byte_at_.compare_exchange_strong(never, now);
    }
    last_byte_at_.store(now, std::memory_order_relaxed);
}

void Job::sent(const Item &item) {
    if (sent_flag(item.rank, item.chunk).exchange(1)) return;
    (item.kind == Kind::contribution ? contributions_sent_ : results_sent_)[item.rank].fetch_add(1);
    if (item.kind == Kind::result && !is_voter(item.rank)) {
        if (joiner_sends_left_.fetch_sub(1) == 1 && finished())
            events_.post({Event::Type::released, 0, 0, transfer, 0, {}});
        return;
    }
    if (voter_sends_left_.fetch_sub(1) != 1) return;
    for (uint32_t rank = 0; rank < links_.size(); ++rank)
        if (!is_voter(rank) && links_[rank]) links_[rank]->wake();
    maybe_done();
}

void Job::finish() {
    finished_.store(true, std::memory_order_release);
    voter_sends_left_.store(0, std::memory_order_release);
    for (uint32_t rank = 0; rank < links_.size(); ++rank)
        if (!is_voter(rank) && links_[rank]) links_[rank]->wake();
}

void Job::maybe_done() {
    if (!begun() || results_left_.load() || voter_sends_left_.load()) return;
    if (done_.exchange(true)) return;
    events_.post({Event::Type::job_done, 0, 0, transfer, 0, {}});
}

JobProgress Job::progress() const {
    JobProgress out;
    for (uint32_t rank = 0; rank < links_.size(); ++rank) {
        out.contributions_received.push_back(contributions_received_[rank].load());
        out.results_received.push_back(results_received_[rank].load());
        out.contributions_sent.push_back(contributions_sent_[rank].load());
        out.results_sent.push_back(results_sent_[rank].load());
    }
    out.first_byte_at = first_byte_at_.load();
    out.last_byte_at = last_byte_at_.load();
    return out;
}

void Job::missing(uint32_t rank, ChunkNames &contributions, ChunkNames &results) const {
    if (!begun() || rank >= links_.size() || rank == spec.rank) return;
    for (uint32_t c = 0; c < chunks_.size(); ++c) {
        if (is_child(c, rank) || swaps_with(c, rank)) {
            if (place(c).weights[rank] > 0 && !contributed_[rank * chunks_.size() + c].load())
                contributions.emplace_back(chunks_[c].part, chunks_[c].index);
        } else if (parent(c) == rank && !landing.done(c)) {
            results.emplace_back(chunks_[c].part, chunks_[c].index);
        }
    }
}

void Job::resend(uint32_t rank, const ChunkNames &contributions, const ChunkNames &results) {
    if (!begun() || rank >= links_.size() || rank == spec.rank) return;
    std::vector<Item> items;
    auto again = [&](Kind kind, const ChunkNames &names) {
        for (auto [part, index] : names) {
            uint32_t c;
            if (!find(part, index, c) || !(kind == Kind::result ? is_child(c, rank) : receiver(c) == rank)) continue;
            // A chunk that was never sent is still queued, or is queued once it is ready.
            if (sent_flag(rank, c).load()) items.push_back(frame(kind, rank, c, true));
        }
    };
    again(Kind::contribution, contributions);
    again(Kind::result, results);
    links_[rank]->push(std::move(items));
}

std::vector<std::string> Job::part_crcs() const {
    std::vector<std::string> out;
    for (uint32_t p = 0; p < spec.parts.size(); ++p)
        out.emplace_back(reinterpret_cast<const char *>(crcs_.data() + first_chunk_[p]),
                         (first_chunk_[p + 1] - first_chunk_[p]) * sizeof(uint32_t));
    return out;
}

}  // namespace p2pavg::pump
