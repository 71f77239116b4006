#include "model/embodiments.h"

#include <array>

#include "base/error.h"

namespace orrery {

namespace {
constexpr std::array<Embodiment, 27> kEmbodiments{{
    {"no_action", 0, 0},
    {"av", 1, 9},
    {"camera_pose", 2, 9},
    {"hand_pose", 3, 57},
    {"pusht", 4, 2},
    {"libero", 5, 0},
    {"umi", 6, 10},
    {"bridge_orig_lerobot", 7, 10},
    {"droid_lerobot", 8, 10},
    {"robomind-franka", 8, 10},
    {"galbot", 9, 30},
    {"embodiment_b", 9, 0},
    {"robomind-franka-dual", 12, 20},
    {"robomind-ur", 13, 10},
    {"agibotworld", 15, 29},
    {"agibot_gear_gripper", 15, 29},
    {"agibot_gear_gripper_ext", 15, 29},
    {"embodiment_c_gripper", 15, 0},
    {"embodiment_c_gripper_ext", 15, 0},
    {"xdof_yam", 16, 20},
    {"molmoact2_yam", 16, 20},
    {"abc_yam", 16, 20},
    {"robotwin", 17, 14},
    {"fractal", 20, 10},
    {"drawanything", 21, 3},
    {"behavior1k_lerobot", 22, 23},
    {"maniparena", 23, 20},
}};
}  // namespace

const Embodiment& find_embodiment(std::string_view name) {
  std::string known;
  for (const Embodiment& entry : kEmbodiments) {
    if (entry.name == name) {
      require(entry.raw_width > 0, "domain_name \"", name,
              "\" has no canonical action width and cannot be used for actions");
      return entry;
    }
    if (entry.raw_width > 0) known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  fail(ErrorKind::invalid_argument, "domain_name \"", name, "\" is not known; known are ", known);
}

}  // namespace orrery
