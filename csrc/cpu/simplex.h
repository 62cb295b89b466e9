// The simplex method for a program that the origin fits, whose rows come one after the other.
#pragma once

#include <cstddef>
#include <vector>

// Maximises the sum of y where each row times y is at most 1 and y >= 0. Rows that are added later are met by dual
// pivots from where the last solution stands (Lemke 1954), which are few where the solution breaks few of them.
class P2PAvgSimplex {
  public:
    explicit P2PAvgSimplex(size_t columns);

    size_t columns() const { return columns_; }
    void add(const double *row);
    void solve(size_t most);  // most: pivots, at most
    void solution(double *y) const;

  private:
    void pivot(size_t leaves, size_t enters);
    bool improve();  // false: nothing gains
    bool repair();   // false: no row is broken

    size_t columns_;
    std::vector<double> table_;   // [rows][columns]
    std::vector<double> limits_;  // values of the basic variables, one a row
    std::vector<double> gains_;   // what the sum gains by each of the others
    std::vector<size_t> basic_, other_;  // below `columns`: a y, else a slack
    std::vector<double> row_, slopes_;
};
