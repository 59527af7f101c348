package ai.omnidraft;

import ai.onnxruntime.NodeInfo;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OnnxValue;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtEpDevice;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtLoraAdapter;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.TensorInfo;
import ai.onnxruntime.providers.NNAPIFlags;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.EnumSet;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;

/**
 * One graph of an OmniDraft bundle, target or drafter: rows of tokens behind a past that can be rolled back.
 *
 * <p>Rolling back is setting a length: the graph takes as many rows of its past as the attention mask says, and
 * overwrites what lies behind them. Not for use by several threads at once.
 */
public final class OmniDraftModel implements AutoCloseable {
  private static final String PAST = "past_key_values.";

  private final OrtEnvironment environment;
  private final OrtSession session;
  private final Set<String> outputs = new HashSet<>();
  private final Map<String, OnnxTensor> past = new HashMap<>();
  private final OrtSession.RunOptions runOptions = new OrtSession.RunOptions();
  private final int vocabulary;
  private OrtSession.Result kept; // owns the tensors of `past`, once there was a pass
  private OrtLoraAdapter adapter;
  private int length;

  /**
   * Opens a graph on the CPU, which is where dynamic graphs run best on phones.
   *
   * @param model path of the .onnx file, beside which its weights lie, or of the .ort file
   * @param threads threads of one pass
   */
  public OmniDraftModel(OrtEnvironment environment, String model, int threads) throws OrtException {
    this(environment, model, cpu(threads));
  }

  /** Opens a graph with options of one's own, for instance {@link #nnapi()} or {@link #qnn}. */
  public OmniDraftModel(OrtEnvironment environment, String model, OrtSession.SessionOptions options)
      throws OrtException {
    this.environment = environment;
    this.session = environment.createSession(model, options);
    for (String name : session.getOutputNames()) {
      if (name.equals("logits") || name.startsWith("present.")) {
        outputs.add(name);
      }
    }
    for (Map.Entry<String, NodeInfo> input : session.getInputInfo().entrySet()) {
      if (input.getKey().startsWith(PAST)) {
        long[] shape = ((TensorInfo) input.getValue().getInfo()).getShape();
        long[] empty = {1, shape[1], 0, shape[3]};
        past.put(input.getKey(), OnnxTensor.createTensor(environment, FloatBuffer.allocate(0), empty));
      }
    }
    long[] shape = ((TensorInfo) session.getOutputInfo().get("logits").getInfo()).getShape();
    this.vocabulary = (int) shape[2];
  }

  /** Options for the CPU. */
  public static OrtSession.SessionOptions cpu(int threads) throws OrtException {
    OrtSession.SessionOptions options = new OrtSession.SessionOptions();
    options.setIntraOpNumThreads(threads);
    return options;
  }

  /** Options for NNAPI, which is deprecated and takes fixed-shape graphs only. */
  public static OrtSession.SessionOptions nnapi() throws OrtException {
    OrtSession.SessionOptions options = new OrtSession.SessionOptions();
    options.addNnapi(EnumSet.of(NNAPIFlags.USE_FP16, NNAPIFlags.CPU_DISABLED));
    return options;
  }

  /**
   * Options for a Snapdragon NPU, which takes fixed-shape graphs only.
   *
   * @param library path of the QNN provider library
   * @throws IllegalStateException if this device has no such NPU; ONNX Runtime would go on without a word
   */
  public static OrtSession.SessionOptions qnn(OrtEnvironment environment, String library) throws OrtException {
    String name = "QNNExecutionProvider";
    environment.registerExecutionProviderLibrary(name, library);
    List<OrtEpDevice> devices = new ArrayList<>();
    for (OrtEpDevice device : environment.getEpDevices()) {
      if (device.getEpName().equals(name)) {
        devices.add(device);
      }
    }
    if (devices.isEmpty()) {
      throw new IllegalStateException("QNN offers no device here; use the CPU");
    }
    OrtSession.SessionOptions options = new OrtSession.SessionOptions();
    Map<String, String> settings = new HashMap<>();
    settings.put("backend_type", "htp");
    settings.put("htp_performance_mode", "burst");
    options.addExecutionProvider(devices, settings);
    return options;
  }

  /** Rows of past that count. */
  public int length() {
    return length;
  }

  /** Feeds tokens behind the past, which grows by them, and returns the logits behind each. */
  public float[][] run(long[] ids) throws OrtException {
    int total = length + ids.length;
    long[] mask = new long[total];
    Arrays.fill(mask, 1);
    Map<String, OnnxTensor> feeds = new HashMap<>(past);
    OrtSession.Result result;
    try (OnnxTensor tokens = row(ids);
        OnnxTensor seen = row(mask)) {
      feeds.put("input_ids", tokens);
      feeds.put("attention_mask", seen);
      result = session.run(feeds, outputs, runOptions);
    }
    FloatBuffer logits = ((OnnxTensor) value(result, "logits")).getFloatBuffer();
    float[][] rows = new float[ids.length][vocabulary];
    for (float[] row : rows) {
      logits.get(row);
    }
    keep(result);
    length = total;
    return rows;
  }

  /** Forgets every row after the first {@code rows}. */
  public void rollback(int rows) {
    if (rows < 0 || rows > length) {
      throw new IllegalArgumentException("cannot roll back from " + length + " rows to " + rows);
    }
    length = rows;
  }

  /** Uses an exported .onnx_adapter from the next pass on. The past, computed without it, is forgotten. */
  public void useAdapter(byte[] file) throws OrtException {
    if (adapter != null) {
      throw new IllegalStateException("this model has an adapter; open the model again to use another one");
    }
    adapter = OrtLoraAdapter.create(file);
    runOptions.addActiveLoraAdapter(adapter);
    length = 0;
  }

  @Override
  public void close() throws OrtException {
    closePast();
    if (adapter != null) {
      adapter.close();
    }
    runOptions.close();
    session.close();
  }

  private OnnxTensor row(long[] values) throws OrtException {
    return OnnxTensor.createTensor(environment, LongBuffer.wrap(values), new long[] {1, values.length});
  }

  private void keep(OrtSession.Result result) {
    closePast();
    for (String name : past.keySet()) {
      past.put(name, (OnnxTensor) value(result, "present." + name.substring(PAST.length())));
    }
    kept = result;
  }

  private void closePast() {
    if (kept != null) {
      kept.close();
      return;
    }
    for (OnnxTensor tensor : past.values()) {
      tensor.close();
    }
  }

  private static OnnxValue value(OrtSession.Result result, String name) {
    return result.get(name).orElseThrow(() -> new IllegalStateException("the graph has no output " + name));
  }
}
