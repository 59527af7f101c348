"""How people begin a request. The target goes on from here when it invents prompts: left alone it asks for advice."""

OPENINGS = (
    # Nothing: what the target asks by itself.
    "", "", "", "", "", "", "", "",
    # Questions.
    "Who", "What", "What is", "What are", "When did", "When was", "Where is", "Where does", "Why do", "Why is",
    "How do", "How does", "How many", "How long", "Which", "Is it", "Can you", "Does", "In what", "Who was",
    "What is the difference between", "What would happen if", "How can I", "Name", "Tell me",
    # Explaining.
    "Explain", "Explain how", "Describe", "Define", "Give me the definition of", "Discuss", "Compare", "Outline",
    "Analyze", "Provide an overview of", "Give an example of", "List", "List three", "List five", "Summarize the",
    # Writing.
    "Write", "Write a", "Write a short story about", "Write a poem about", "Write an email to", "Write a letter to",
    "Write a paragraph about", "Write an essay on", "Write a conversation between", "Write a review of", "Draft",
    "Compose", "Create a", "Create a list of", "Generate a", "Come up with", "Brainstorm", "Design a", "Suggest",
    "Recommend", "Give me", "Give me a joke about", "Imagine you are", "Pretend to be", "Act as", "You are a",
    "I want you to act as", "Help me", "Make a plan for", "Plan a", "Develop", "Invent",
    # Working on something that is given.
    "Summarize:", "Summarize the following article:\n\n", "Summarize this text in two sentences.\n\n",
    "Summarize: In a statement on Monday,", "Summarize: The", "Write a headline for the following story:\n\n",
    "Rewrite the following sentence:\n\n", "Correct the grammar of this sentence.\n\n", "Reply to this email.\n\nDear",
    "Translate into English:", "Translate the following German sentence into English: Die",
    "Translate German to English:", "Translate French to English:", "Translate into Spanish:",
    "Extract all names from the paragraph.\n\n", "Classify the following", "Sort the following",
    "Given the following", "Read the passage and answer the question.\n\n", "Based on the following text, answer:",
    "Answer the question with the help of the documents.\n\n", "Is the following statement true?",
    "Complete the sentence:", "Find the", "Identify the", "Match the", "Fill in the blank:", "Paraphrase:",
    "Input:",
    # Reasoning and numbers.
    "If", "Calculate", "Solve", "A train", "Suppose", "Tom has", "Which word does not belong:", "Convert",
    "Estimate", "A store sells", "Given a", "Answer the following math problem.", "Is this argument valid?",
    # Talking.
    "I am", "I have", "I need", "I want to", "My", "I feel", "I broke", "We are", "Hello,", "Please", "Should I",
    "What should I", "Do you", "Let's",
)  # fmt: skip
