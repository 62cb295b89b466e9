#include "simplex.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "float_mode.h"

namespace {

constexpr double ZERO = 1e-11;
constexpr double INF = std::numeric_limits<double>::infinity();

}  // namespace

P2PAvgSimplex::P2PAvgSimplex(size_t columns)
    : columns_(columns), gains_(columns, 1.0), other_(columns), row_(columns) {
    std::iota(other_.begin(), other_.end(), size_t{0});
}

void P2PAvgSimplex::add(const double *row) {
    // What the row is in terms of the variables that are not basic now.
    double limit = 1.0;
    for (size_t j = 0; j < columns_; j++) row_[j] = other_[j] < columns_ ? row[other_[j]] : 0.0;
    for (size_t i = 0; i < basic_.size(); i++) {
        const double times = basic_[i] < columns_ ? row[basic_[i]] : 0.0;
        if (times == 0.0) continue;
        const double *from = table_.data() + i * columns_;
        for (size_t j = 0; j < columns_; j++) row_[j] -= times * from[j];
        limit -= times * limits_[i];
    }
    basic_.push_back(columns_ + basic_.size());
    limits_.push_back(limit);
    table_.insert(table_.end(), row_.begin(), row_.end());
}

void P2PAvgSimplex::solve(size_t most) {
    if (basic_.empty()) return;  // nothing holds the sum back
    const p2pavg::DefaultFloatMode mode;
    slopes_.resize(basic_.size());
    for (size_t pivots = 0; pivots < most; pivots++)
        if (!repair() && !improve()) break;
}

bool P2PAvgSimplex::improve() {
    const size_t enters = std::max_element(gains_.begin(), gains_.end()) - gains_.begin();
    if (gains_[enters] <= ZERO) return false;
    size_t leaves = 0;
    double least = INF;
    for (size_t i = 0; i < basic_.size(); i++) {
        const double slope = table_[i * columns_ + enters];
        if (slope > ZERO && limits_[i] / slope < least) {
            least = limits_[i] / slope;
            leaves = i;
        }
    }
    if (least == INF) return false;
    pivot(leaves, enters);
    return true;
}

bool P2PAvgSimplex::repair() {
    const size_t leaves = std::min_element(limits_.begin(), limits_.end()) - limits_.begin();
    if (limits_[leaves] >= -ZERO) return false;
    size_t enters = columns_;
    double least = INF;
    for (size_t j = 0; j < columns_; j++) {
        const double slope = table_[leaves * columns_ + j];
        if (slope < -ZERO && gains_[j] / slope < least) {
            least = gains_[j] / slope;
            enters = j;
        }
    }
    if (enters == columns_) return false;
    pivot(leaves, enters);
    return true;
}

void P2PAvgSimplex::pivot(size_t leaves, size_t enters) {
    const size_t rows = basic_.size();
    for (size_t i = 0; i < rows; i++) {
        slopes_[i] = table_[i * columns_ + enters];
        table_[i * columns_ + enters] = 0.0;
    }
    const double by = slopes_[leaves], limit = limits_[leaves] / by, gain = gains_[enters];
    for (size_t j = 0; j < columns_; j++) row_[j] = table_[leaves * columns_ + j] / by;
    row_[enters] = 1 / by;
    slopes_[leaves] = 0.0;
    for (size_t i = 0; i < rows; i++) {
        if (slopes_[i] == 0.0) continue;
        double *into = table_.data() + i * columns_;
        for (size_t j = 0; j < columns_; j++) into[j] -= slopes_[i] * row_[j];
        limits_[i] -= slopes_[i] * limit;
    }
    std::copy(row_.begin(), row_.end(), table_.begin() + leaves * columns_);
    limits_[leaves] = limit;
    gains_[enters] = 0.0;
    for (size_t j = 0; j < columns_; j++) gains_[j] -= gain * row_[j];
    std::swap(basic_[leaves], other_[enters]);
}

void P2PAvgSimplex::solution(double *y) const {
    std::fill(y, y + columns_, 0.0);
    for (size_t i = 0; i < basic_.size(); i++)
        if (basic_[i] < columns_) y[basic_[i]] = std::max(limits_[i], 0.0);
}
