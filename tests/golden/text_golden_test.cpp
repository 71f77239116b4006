// Ids and texts of the reference tokenizer, and the prompts of the reference pipeline. All are
// compared exactly: there is no arithmetic to round.
#include <gtest/gtest.h>

#include "golden/golden.h"
#include "text/prompt.h"
#include "text/tokenizer.h"

namespace orrery {
namespace {

std::vector<int64_t> ids_of(const Json& list) {
  std::vector<int64_t> ids;
  for (const Json& id : list.items()) ids.push_back(id.as_int());
  return ids;
}

class TokenizerGolden : public testing::Test {
 protected:
  void SetUp() override {
    ORRERY_SKIP_WITHOUT("tokenizer_qwen3");
    case_ = Json::load(folder_ / "case.json");
    tokenizer_.emplace(Tokenizer::load(folder_));
  }
  const std::filesystem::path folder_ = golden::directory() / "tokenizer_qwen3";
  Json case_;
  std::optional<Tokenizer> tokenizer_;
};

TEST_F(TokenizerGolden, Encode) {
  ASSERT_FALSE(case_.at("encode").items().empty());
  for (const Json& entry : case_.at("encode").items()) {
    const std::string& text = entry.at("text").as_string();
    EXPECT_EQ(tokenizer_->encode(text), ids_of(entry.at("ids"))) << text;
  }
}

TEST_F(TokenizerGolden, Decode) {
  ASSERT_FALSE(case_.at("decode").items().empty());
  for (const Json& entry : case_.at("decode").items()) {
    const std::string& text = entry.at("text").as_string();
    EXPECT_EQ(tokenizer_->decode(ids_of(entry.at("ids"))), text);
  }
}

// The folder's tokenizer of the whole-run cases made the ids; the shipped one is the same file.
std::filesystem::path tokenizer_folder() {
  const auto own = golden::directory() / "pipeline/model/text_tokenizer";
  return std::filesystem::exists(own) ? own : golden::model_directory() / "text_tokenizer";
}

// The arguments of one recorded call, with the defaults of the reference's function.
class Call {
 public:
  explicit Call(const Json& call) : call_(call) {
    settings_.num_frames = integer("num_frames", 189);
    settings_.height = integer("height", 720);
    settings_.width = integer("width", 1280);
    settings_.fps = call.has("fps") ? call.at("fps").as_double() : 24.0;
    settings_.duration_template = flag("add_duration_template");
    settings_.resolution_template = flag("add_resolution_template");
  }

  std::vector<Message> positive() const {
    return conversation(action() ? caption() : positive_text(text("prompt"), settings_));
  }
  std::vector<Message> negative() const {
    const std::string negative = text("negative_prompt");
    return conversation(action() ? negative : negative_text(negative, settings_));
  }

 private:
  const Json* given(std::string_view key) const {
    const Json* value = call_.find(key);
    return value != nullptr && !value->is_null() ? value : nullptr;
  }
  std::string text(std::string_view key) const { return given(key) ? given(key)->as_string() : ""; }
  int64_t integer(std::string_view key, int64_t absent) const {
    return given(key) ? given(key)->as_int() : absent;
  }
  bool flag(std::string_view key) const { return given(key) == nullptr || given(key)->as_bool(); }
  bool action() const { return given("action_mode") != nullptr; }

  std::string caption() const {
    ActionCaption caption;
    caption.prompt = text("prompt");
    caption.view_point.reset();
    if (const Json* view_point = given("action_view_point"))
      caption.view_point = view_point->as_string();
    caption.chunk_size = settings_.num_frames - 1;
    caption.fps = settings_.fps;
    caption.canvas_height = settings_.height;
    caption.canvas_width = settings_.width;
    return action_text(caption);
  }
  std::vector<Message> conversation(std::string user) const {
    SystemPrompt system = settings_.num_frames == 1 ? SystemPrompt::image : SystemPrompt::video;
    if (!flag("use_system_prompt")) system = SystemPrompt::none;
    return conversation_of(system, std::move(user));
  }

  const Json& call_;
  PromptSettings settings_;
};

void expect_conversation(const std::vector<Message>& got, const Json& want) {
  ASSERT_EQ(got.size(), want.items().size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].role, want.at(i).at("role").as_string());
    EXPECT_EQ(got[i].content, want.at(i).at("content").as_string());
  }
}

TEST(PromptGolden, ConversationsAndIds) {
  ORRERY_SKIP_WITHOUT("prompts");
  const Json file = Json::load(golden::directory() / "prompts/case.json");
  const Tokenizer tokenizer = Tokenizer::load(tokenizer_folder());
  ASSERT_FALSE(file.at("cases").items().empty());
  for (const Json& entry : file.at("cases").items()) {
    SCOPED_TRACE(entry.at("call").dump());
    const Call call(entry.at("call"));
    expect_conversation(call.positive(), entry.at("cond_conversation"));
    expect_conversation(call.negative(), entry.at("uncond_conversation"));
    EXPECT_EQ(prompt_ids(tokenizer, call.positive()), ids_of(entry.at("cond_ids")));
    EXPECT_EQ(prompt_ids(tokenizer, call.negative()), ids_of(entry.at("uncond_ids")));
  }
}

}  // namespace
}  // namespace orrery
