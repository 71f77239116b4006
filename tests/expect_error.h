// Expects an orrery::Error of one kind whose message holds given parts.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "base/error.h"

namespace orrery {

// Returns the message, "" (and a failed expectation) when nothing was thrown.
template <typename Action>
std::string expect_error(ErrorKind kind, std::initializer_list<std::string_view> parts,
                         Action action) {
  try {
    action();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << message;
    for (const std::string_view part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << "no \"" << part << "\" in: " << message;
    }
    return message;
  }
  ADD_FAILURE() << "no error was thrown";
  return "";
}

}  // namespace orrery
