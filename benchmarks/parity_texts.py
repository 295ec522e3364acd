"""Texts with which real models are compared: prose in two languages, and prompts to continue."""

ENGLISH = """\
The harbor of Ellan lies at the end of a long fjord, where the water is so still on winter mornings that the boats
seem to hang in the air. My grandmother ran the post office there for thirty-one years. She knew every family by the
weight of its letters, and she used to say that a thin envelope was worth more than a thick one, because people who
have something to say need few words.

When the road came, the ferry stopped, and with it went half of the mail. The new bridge was a clean arc of
concrete, six hundred meters long, built by engineers from the capital in under three years. They had measured the
wind for two winters before the first pillar was set. One of them, a quiet man with a notebook, lodged above the
bakery and wrote down the height of the tide each morning at seven. He told us that a bridge does not fall because
of one great storm. It falls because of a thousand small movements that were never counted.

He came back to my mind when I began to repair clocks. A clock loses a second a day for many reasons: the oil
thickens, a spring grows tired, dust settles on a wheel. If you change everything together, you learn nothing. So I
write down the error in the evening, change one thing, and write down the error in the morning. My table has eleven
columns by now, and the oldest clock in the shop, a heavy thing from 1874 with a painted moon, is right within four
seconds a month.

Last spring a girl of about nine came in with her father's watch. It had stopped in the rain. "Can you make it go
backwards?" she asked. I said that I could not, but that I could show her why it goes forward. We opened the case
together. She looked at the escapement for a long time, counted its teeth twice, and then said that it was not the
spring that told the time but the little arm that kept saying no. I have read books about clocks that say it less
well.
"""

HINDI = """\
हमारे गाँव के पास एक पुरानी नदी बहती है। बरसात के दिनों में उसका पानी खेतों
तक पहुँच जाता है और बच्चे कागज़ की नावें चलाते हैं। मेरे दादाजी कहते थे कि
नदी हर साल थोड़ा-सा रास्ता बदल लेती है, जैसे कोई बूढ़ा आदमी चलते-चलते अपनी
छड़ी का हाथ बदलता है। सर्दियों में सुबह कोहरा इतना घना होता है कि सामने का
पेड़ भी दिखाई नहीं देता। फिर भी डाकिया अपनी साइकिल पर ठीक आठ बजे आता है और
सबको नाम लेकर पुकारता है।

पिछले साल गाँव में एक छोटा पुस्तकालय खुला। वहाँ तीन सौ किताबें हैं, दो लंबी
मेज़ें और एक पंखा। शाम को जब बिजली चली जाती है, तब लोग लालटेन जलाकर पढ़ते
हैं। मेरी बहन वहाँ बच्चों को गणित सिखाती है। वह कहती है कि सवाल का उत्तर
उतना ज़रूरी नहीं है जितना यह समझना कि उत्तर सही क्यों है। एक दिन उसने बच्चों
से पूछा कि नदी का पानी कितना है। किसी ने कहा बहुत, किसी ने कहा अनंत। सबसे
छोटे बच्चे ने कहा, पहले यह बताओ कि बाल्टी कितनी बड़ी है।
"""

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea, there lived",
    "The three primary colors are",
    "def fibonacci(n):\n    ",
    "To bake a loaf of bread, you first need to",
    "The difference between a virus and a bacterium is that",
    "SELECT name, age FROM users WHERE",
    "In 1969, the first humans",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "My favorite season is autumn because",
    "The square root of 144 is",
    "A good friend is someone who",
    "The largest planet in our solar system is",
    "import numpy as np\n\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "The history of the bicycle begins",
    "If a train travels 60 miles in one hour, then in three hours it",
    "She opened the door slowly and saw",
    "The recipe calls for two cups of flour,",
    "Gravity is a force that",
    "Q: What is the tallest mountain in the world?\nA:",
    "The main causes of the First World War were",
    "नमस्ते, मेरा नाम",
    "भारत की राजधानी",
    "Le petit chat est",
    '{"name": "Ada", "born": 1815, "field":',
    "1, 1, 2, 3, 5, 8,",
    "The sound of rain on a tin roof",
)
