#include "dist/world.h"

#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "dist/nccl_comm.h"
#include "dist/thread_comm.h"
#include "tensor/tensor.h"

namespace orrery {
namespace {

TEST(World, GroupsFollowTheMeshAndAxesOfOneHaveNone) {
  const Mesh mesh{2, 3, 1};
  ThreadWorld world(mesh.world());
  EXPECT_EQ(world.local(), (std::vector<int>{0, 1, 2, 3, 4, 5}));
  world.run([&](int rank) {
    const MeshGroups groups = make_groups(world, mesh, rank);
    ASSERT_TRUE(groups.tp && groups.cp);
    EXPECT_FALSE(groups.cfg);
    EXPECT_EQ(groups.leads(), rank == 0);
    EXPECT_EQ(groups.tp->rank(), groups.place().tp);
    EXPECT_EQ(groups.cp->rank(), groups.place().cp);
    const Tensor x = allocate_host_tensor({1}, DType::f32);
    x.view.as<float>()[0] = float(1 << rank);
    groups.tp->all_reduce(x.view);  // the pair of neighbours
    EXPECT_EQ(x.view.as<float>()[0], float(3 << (rank / 2 * 2)));
    groups.cp->all_reduce(x.view);  // over the pairs
    EXPECT_EQ(x.view.as<float>()[0], 63.0f);
  });
}

TEST(World, AbsentGroupsHaveAPlaceAndNoPeers) {
  const MeshGroups groups = make_absent_groups({1, 4, 2}, 6);
  EXPECT_FALSE(groups.tp);
  ASSERT_TRUE(groups.cp && groups.cfg);
  EXPECT_EQ(groups.cp->rank(), 2);
  EXPECT_EQ(groups.cp->size(), 4);
  EXPECT_EQ(groups.cfg->rank(), 1);
  try {
    groups.cp->barrier();
    FAIL() << "nobody is there";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "barrier: the other 3 ranks of this group are not running");
  }
}

TEST(World, WithoutNcclDevicesAreRefused) {
  if (is_nccl_built()) GTEST_SKIP() << "this build has NCCL";
  MeshGroups groups = make_absent_groups({1, 2, 1}, 0);
  try {
    make_nccl_communicator(std::move(groups.cp), {});
    FAIL() << "there is no NCCL";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::unsupported);
    EXPECT_NE(std::string(error.what()).find("ORRERY_NCCL=ON"), std::string::npos);
  }
}

}  // namespace
}  // namespace orrery
