#include "dist/communicator.h"

#include <algorithm>

#include "base/error.h"

namespace orrery {

namespace {
// More parts hide little more and make each product smaller.
constexpr int64_t kMaxParts = 4;
// Parts begin at whole tiles of a matrix product.
constexpr int64_t kPartStep = 128;
}  // namespace

Communicator::Ticket Communicator::start_all_reduce(MutView x) {
  all_reduce(x);
  return 0;
}

Communicator::Ticket Communicator::start_exchange(std::span<const Trade> trades) {
  exchange(trades);
  return 0;
}

void check_trade(const Trade& trade, int ranks, DeviceKind device) {
  for (const View& x : {View(trade.out), trade.x}) {
    require(x.device == device, "exchange: these ranks move ",
            device == DeviceKind::cpu ? "host" : "device", " memory only");
    require(x.rank() > 0 && x.dim(0) == ranks && x.shape == trade.x.shape &&
                x.dtype == trade.x.dtype && x.select(0, 0).contiguous(),
            "exchange: ", ranks,
            " ranks trade contiguous blocks of equal shape, one for each; got ", trade.x.shape,
            " for ", trade.out.shape);
  }
}

void check_halos(const Halos& halos, DeviceKind device) {
  for (const View& x :
       {View(halos.from_previous), View(halos.from_next), halos.to_previous, halos.to_next}) {
    require(x.device == device, "exchange_halos: these ranks move ",
            device == DeviceKind::cpu ? "host" : "device", " memory only");
    require(x.rank() > 0 && x.shape == halos.to_next.shape && x.dtype == halos.to_next.dtype &&
                (x.dim(0) == 0 || x.select(0, 0).contiguous()),
            "exchange_halos: neighbours swap equal numbers of contiguous blocks; got ", x.shape,
            " beside ", halos.to_next.shape);
  }
}

std::vector<RowRange> row_parts(int64_t rows, const Communicator* group) {
  if (group == nullptr || group->size() == 1) return {{0, rows}};
  const int64_t count = std::clamp<int64_t>(rows / group->part_rows(), 1, kMaxParts);
  const int64_t tiles = (rows + count * kPartStep - 1) / (count * kPartStep);
  const int64_t step = count == 1 ? rows : tiles * kPartStep;
  std::vector<RowRange> parts;
  for (int64_t begin = 0; begin < rows; begin += step) {
    parts.push_back({begin, std::min(step, rows - begin)});
  }
  if (parts.empty()) parts.push_back({0, 0});
  return parts;
}

}  // namespace orrery
