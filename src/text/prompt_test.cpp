#include "text/prompt.h"

#include <gtest/gtest.h>

#include <cmath>

#include "expect_error.h"
#include "scratch_folder.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

std::filesystem::path pico_folder() { return source_dir() / "models/cosmos3-pico/text_tokenizer"; }

TEST(Prompt, SentencesFollowThePrompt) {
  const PromptSettings settings;
  EXPECT_EQ(positive_text("A cat.", settings),
            "A cat. The video is 7.9 seconds long and is of 24 FPS. This video is of 720x1280 "
            "resolution.");
  EXPECT_EQ(negative_text("bad.", settings),
            "bad. The video is not 7.9 seconds long and is not of 24 FPS. This video is not of "
            "720x1280 resolution.");
}

TEST(Prompt, TrailingDotsGo) {
  PromptSettings settings;
  settings.num_frames = 1;
  EXPECT_EQ(positive_text("A cat...", settings), "A cat. This image is of 720x1280 resolution.");
  EXPECT_EQ(positive_text("...", settings), "This image is of 720x1280 resolution.");
  EXPECT_EQ(positive_text("a!", settings), "a!. This image is of 720x1280 resolution.");
  EXPECT_EQ(positive_text("a. ", settings), "a. . This image is of 720x1280 resolution.");
  settings.resolution_template = false;
  EXPECT_EQ(positive_text("A cat...", settings), "A cat...");  // nothing appended, nothing taken
}

// B58: empty prompts have a text, or are empty with the templates off.
TEST(Prompt, EmptyPrompts) {
  PromptSettings settings;
  EXPECT_EQ(negative_text("", settings),
            "The video is not 7.9 seconds long and is not of 24 FPS. This video is not of 720x1280 "
            "resolution.");
  settings.duration_template = settings.resolution_template = false;
  EXPECT_EQ(positive_text("", settings), "");
}

// B31: the sentences follow a JSON prompt too, whatever it says itself.
TEST(Prompt, JsonPromptsAreText) {
  PromptSettings settings;
  settings.duration_template = false;
  EXPECT_EQ(
      positive_text(R"({"resolution": {"H": 480}, "q": "a; \"b\"."})", settings),
      R"({"resolution": {"H": 480}, "q": "a; \"b\"."}. This video is of 720x1280 resolution.)");
}

TEST(Prompt, NumbersAreRoundedHalfToEven) {
  PromptSettings settings;
  settings.resolution_template = false;
  const auto text = [&](int64_t frames, double fps) {
    settings.num_frames = frames;
    settings.fps = fps;
    return positive_text("", settings);
  };
  EXPECT_EQ(text(121, 29.97), "The video is 4.0 seconds long and is of 30 FPS.");
  EXPECT_EQ(text(5, 4), "The video is 1.2 seconds long and is of 4 FPS.");   // 1.25 is a tie
  EXPECT_EQ(text(15, 4), "The video is 3.8 seconds long and is of 4 FPS.");  // 3.75 is a tie
  EXPECT_EQ(text(3, 20),
            "The video is 0.1 seconds long and is of 20 FPS.");  // 0.15 lies below the tie
  EXPECT_EQ(text(25, 2.5), "The video is 10.0 seconds long and is of 2 FPS.");
  EXPECT_EQ(text(35, 3.5), "The video is 10.0 seconds long and is of 4 FPS.");
  for (const double fps : std::initializer_list<double>{0, -1, NAN, INFINITY}) {
    expect_error(ErrorKind::invalid_argument, {"fps"}, [&] { text(5, fps); });
  }
}

// Section 4.1; blanks at the prompt's end give way to the one before the sentence.
TEST(EmphasizedText, NamesTheControls) {
  EXPECT_EQ(
      emphasized_text("A road. \n", {"edge"}),
      "A road. Follow the edge control video precisely: shape, contour, silhouette, position, and "
      "motion of every visible structure must align with the edge signal at every frame.");
  EXPECT_EQ(
      emphasized_text("", {"blur", "seg"}),
      " Follow the blur, seg control video precisely: shape, contour, silhouette, position, and "
      "motion of every visible structure must align with the blur, seg signal at every frame.");
}

ActionCaption caption(const char* prompt, int64_t chunk_size, double fps, int64_t height,
                      int64_t width) {
  ActionCaption out;
  out.prompt = prompt;
  out.chunk_size = chunk_size;
  out.fps = fps;
  out.canvas_height = height;
  out.canvas_width = width;
  return out;
}

TEST(Prompt, ActionCaptionIsPythonsJson) {
  ActionCaption cup = caption("Pick up the cup.", 16, 5, 480, 832);
  EXPECT_EQ(
      action_text(cup),
      R"({"cinematography": {"framing": "This video is captured from a first-person perspective looking at the )"
      R"(scene."}, "actions": [{"time": "0:00-0:03", "description": "Pick up the cup."}], "duration": "3s", )"
      R"("fps": 5.0, "resolution": {"H": 480, "W": 832}, "aspect_ratio": "16,9"})");
  cup.view_point = std::nullopt;
  cup.prompt = " \u3000na\u00efve \U0001f600\n";
  EXPECT_EQ(
      action_text(cup),
      R"({"actions": [{"time": "0:00-0:03", "description": "na\u00efve \ud83d\ude00."}], "duration": "3s", )"
      R"("fps": 5.0, "resolution": {"H": 480, "W": 832}, "aspect_ratio": "16,9"})");
  ActionCaption known = cup;
  known.view_point = "wrist_view";
  EXPECT_NE(action_text(known).find("wrist-mounted camera."), std::string::npos);
  known.view_point = "nonsense";
  EXPECT_EQ(action_text(known), action_text(cup));
}

TEST(Prompt, ActionTimesRoundAndDurationsTruncate) {
  const auto has = [](const ActionCaption& c, const char* part) {
    return action_text(c).find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(caption("", 4, 2, 1, 1), R"("time": "0:00-0:02", "description": "")"));  // 2.5 s
  EXPECT_TRUE(has(caption("", 4, 2, 1, 1), R"("duration": "2s", "fps": 2.0)"));
  EXPECT_TRUE(
      has(caption("x?", 6, 2, 1, 1), R"("time": "0:00-0:04", "description": "x?")"));  // 3.5 s
  EXPECT_TRUE(has(caption("", 6, 2, 1, 1), R"("duration": "3s")"));
  EXPECT_TRUE(has(caption("", 599, 10, 1, 1), R"("time": "0:00-1:00")"));
  EXPECT_TRUE(has(caption("", 749, 10, 1, 1), R"("time": "0:00-1:15")"));
  EXPECT_TRUE(has(caption("", 9, 0, 1, 1),
                  R"("time": "0:00-0:00", "description": ""}], "duration": "0s", "fps": 0.0)"));
  EXPECT_TRUE(has(caption("", 9, 29.97, 1, 1), R"("fps": 29.97)"));
  expect_error(ErrorKind::invalid_argument, {"chunk size 9", "seconds"},
               [&] { action_text(caption("", 9, 1e-300, 1, 1)); });
  expect_error(ErrorKind::invalid_argument, {"fps"},
               [&] { action_text(caption("", 9, NAN, 1, 1)); });
}

TEST(Prompt, AspectRatioIsTheNearest) {
  const auto ratio = [](int64_t height, int64_t width) {
    const std::string text = action_text(caption("", 1, 1, height, width));
    const size_t at = text.find("aspect_ratio\": \"") + 16;
    return text.substr(at, text.find('"', at) - at);
  };
  EXPECT_EQ(ratio(640, 640), "1,1");
  EXPECT_EQ(ratio(544, 736), "4,3");
  EXPECT_EQ(ratio(736, 544), "3,4");
  EXPECT_EQ(ratio(480, 832), "16,9");
  EXPECT_EQ(ratio(832, 480), "9,16");
  EXPECT_EQ(ratio(8, 7), "1,1");  // 0.875 lies as far from 1 as from 3/4: the first wins
  EXPECT_EQ(ratio(0, 5), "1,1");
}

TEST(Prompt, IdsEndWithEosAndVisionStart) {
  const Tokenizer tokenizer = Tokenizer::load(pico_folder());
  const std::vector<Message> conversation = conversation_of(SystemPrompt::none, "");
  EXPECT_EQ(render_chat(tokenizer, conversation),
            "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(prompt_ids(tokenizer, conversation),  // B58: an empty prompt still has tokens
            (std::vector<int64_t>{539, 503, 198, 540, 198, 539, 467, 198, 540, 541}));
  // A special token written in a prompt is that token.
  const std::vector<int64_t> ids =
      prompt_ids(tokenizer, conversation_of(SystemPrompt::none, "<|vision_end|>"));
  EXPECT_EQ(ids[3], 542);
}

TEST(Prompt, SystemPromptsAreWordedAsTrained) {
  const std::vector<Message> conversation = conversation_of(SystemPrompt::image, "x");
  ASSERT_EQ(conversation.size(), 2u);
  EXPECT_EQ(conversation[0].role, "system");
  EXPECT_EQ(conversation[0].content,
            "You are a helpful assistant who will generate images from a give prompt.");
  EXPECT_EQ(text_of(SystemPrompt::video),
            "You are a helpful assistant who will generate videos from a give prompt.");
  EXPECT_EQ(text_of(SystemPrompt::transfer),
            "You are a helpful assistant that generates images or videos following the user's "
            "instructions and control signals (edge maps, blur, depth, or segmentation).");
  EXPECT_EQ(conversation_of(SystemPrompt::none, "x").size(), 1u);
}

TEST(Prompt, WhatTheFolderLacksIsNamed) {
  const auto tokenizer_with = [](std::string_view config, std::string_view chat,
                                 bool vision_start) {
    const ScratchFolder folder;
    std::string file = ScratchFolder::read(pico_folder() / "tokenizer.json");
    if (!vision_start) file.replace(file.find("<|vision_start|>"), 16, "<|another_name|>");
    folder.write("tokenizer.json", file);
    folder.write("tokenizer_config.json", config);
    if (!chat.empty()) folder.write("chat_template.jinja", chat);
    return Tokenizer::load(folder.path());
  };
  const auto ids = [&](std::string_view config, std::string_view chat, bool vision_start) {
    return [=] {
      prompt_ids(tokenizer_with(config, chat, vision_start),
                 conversation_of(SystemPrompt::none, "x"));
    };
  };
  constexpr std::string_view kConfig = R"({"eos_token": "<|im_end|>"})";
  expect_error(ErrorKind::corrupt, {"tokenizer_config.json", "eos_token"}, ids("{}", "x", true));
  expect_error(ErrorKind::corrupt, {"<|vision_start|>"}, ids(kConfig, "x", false));
  expect_error(ErrorKind::not_found, {"chat_template"}, ids(kConfig, "", true));
  expect_error(ErrorKind::unsupported, {"chat template, line 1", "{% include 'a' %}"},
               ids(kConfig, "{% include 'a' %}", true));
}

// B30: nothing is cut in silence; the limit is one number, without the ids appended.
TEST(Prompt, LongPromptsAreRefusedNotCut) {
  for (const int64_t count : {0, 300, 511, 512, 513, 4095, 4096}) {
    require_prompt_fits(std::vector<int64_t>(static_cast<size_t>(count + kAppendedIds)),
                        "--prompt");
  }
  for (const int64_t count : {4097, 20'000}) {
    expect_error(ErrorKind::invalid_argument,
                 {"--negative-prompt", concat(count), "4096", concat(count - 4096, " more")}, [&] {
                   require_prompt_fits(
                       std::vector<int64_t>(static_cast<size_t>(count + kAppendedIds)),
                       "--negative-prompt");
                 });
  }
  const Tokenizer tokenizer = Tokenizer::load(pico_folder());
  const std::string text(20'000, '1');  // digits are tokens of their own
  const std::vector<int64_t> ids = prompt_ids(tokenizer, conversation_of(SystemPrompt::none, text));
  EXPECT_EQ(ids.size(), 20'000u + 10u);
}

}  // namespace
}  // namespace orrery
