#include "io/checksums.h"

#include <gtest/gtest.h>

#include "scratch_folder.h"

namespace orrery {
namespace {

constexpr const char* kSha256OfAbc =
    "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
constexpr const char* kBlobOfAbc = "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f";  // git hash-object

TEST(Checksums, WhereTheyLieBesideFiles) {
  const ScratchFolder scratch;
  scratch.write("a.bin", "abc");
  scratch.write("a.bin.sha256", std::string(kSha256OfAbc) + "  a.bin\n");
  scratch.write("vae/b.bin", "abc");
  scratch.write(".cache/huggingface/download/vae/b.bin.metadata",
                "commit\n\"" + std::string(kBlobOfAbc) + "\"\n1.0\n");
  scratch.write("blobs/" + std::string(kSha256OfAbc), "abd");
  std::filesystem::create_symlink(scratch.path() / "blobs" / kSha256OfAbc,
                                  scratch.path() / "c.bin");
  scratch.write("plain.bin", "abc");
  scratch.write("other.bin", "abc");
  scratch.write("other.bin.sha256", "no checksum");

  const std::vector<Checksum> found = stated_checksums(scratch.path());
  ASSERT_EQ(found.size(), 4u);  // the blob's own name counts as well
  EXPECT_EQ(found[0].file.filename(), "a.bin");
  EXPECT_EQ(actual_checksum(found[0]), kSha256OfAbc);
  EXPECT_EQ(found[2].file.filename(), "c.bin");
  EXPECT_NE(actual_checksum(found[2]), found[2].hex);
  EXPECT_EQ(found[3].file.filename(), "b.bin");
  EXPECT_EQ(actual_checksum(found[3]), kBlobOfAbc);
}

}  // namespace
}  // namespace orrery
