// Collectives within one group of ranks. A group of one does nothing.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "base/work_observer.h"
#include "tensor/view.h"

namespace orrery {

// Block i of `x` goes to rank i, and block j of `out` came from rank j: [size(), ...] both, equal
// shapes, each block contiguous, any step from block to block.
struct Trade {
  MutView out;
  View x;
};

// Refuses a trade of wrong shapes, types or devices, for `ranks` ranks with memory of `device`.
void check_trade(const Trade& trade, int ranks, DeviceKind device);

// What a rank and its neighbours in the row of ranks hand each other: [n, ...] all four, equal
// shapes, each of the n blocks contiguous, any step from block to block. Nobody stands before the
// first rank or after the last: what they name on that side is left alone.
struct Halos {
  MutView from_previous, from_next;
  View to_previous, to_next;
};

void check_halos(const Halos& halos, DeviceKind device);

// All ranks of a group make the same calls in the same order. Tensors live on the device the group
// was made for and are contiguous, unless the call says otherwise.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // x = sum over ranks of x, in a fixed order (the same bytes on every rank). f32 or bf16.
  virtual void all_reduce(MutView x) = 0;
  // All trades at once. A rank's own blocks are left alone: whoever has something for itself puts
  // it in place.
  virtual void exchange(std::span<const Trade> trades) = 0;
  virtual void exchange_halos(const Halos& halos) = 0;
  // out [size(), ...x.shape], rank order. x may be this rank's own block of out.
  virtual void all_gather(MutView out, View x) = 0;
  virtual void broadcast(MutView x, int root) = 0;
  virtual void barrier() = 0;

  // The same, beside what the backend does next: nothing may read what arrives or change what is
  // sent before finish(ticket), which holds for every earlier ticket too. Communicators of host
  // memory are done when start_*() returns.
  using Ticket = int64_t;
  virtual Ticket start_all_reduce(MutView x);
  virtual Ticket start_exchange(std::span<const Trade> trades);
  virtual void finish(Ticket ticket) { (void)ticket; }
  // Whoever can make rows and send them in turn does so in parts of at least this many: one part
  // travels while the next is made. The same on all ranks.
  virtual int64_t part_rows() const { return std::numeric_limits<int64_t>::max(); }

  // True when the ranks are threads of one process.
  virtual bool shares_process() const { return false; }
  // Ends every collective that a rank of this process waits in, from any thread: called when
  // another rank has failed. Communicators that notice by themselves need not do anything.
  virtual void abort() {}
  // After abort(): ready again. Collective, before whatever is next; does nothing otherwise.
  virtual void renew() {}
  // Told of every collective of device memory, on its own lane; null for none.
  virtual void set_observer(WorkObserver* observer) { (void)observer; }
};

// Rows [begin, begin + count).
struct RowRange {
  int64_t begin = 0, count = 0;
};
// `rows` in a few nearly equal parts of part_rows() or more; one part when there are fewer, or no
// group.
std::vector<RowRange> row_parts(int64_t rows, const Communicator* group);

}  // namespace orrery
